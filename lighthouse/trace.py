"""Show a recovery as one tree of OpenTelemetry spans: the interruption, and its phases below it.

Needs only the OpenTelemetry API; without it nothing happens. Where spans go is said in the usual
way: `opentelemetry-instrument lighthouse serve …` with OTEL_EXPORTER_OTLP_ENDPOINT and the like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from ftcore.wire.messages import show_id
from lighthouse.goodput import Interruption

try:
    from opentelemetry import trace
except ImportError:
    trace = None


def trace_interruption(record: Interruption, *, job: str, wall_offset_s: float) -> None:
    """Emit the spans of a record that is over. `wall_offset_s`: wall clock minus our clock."""
    if trace is None:
        return
    tracer = trace.get_tracer("ftcore.lighthouse")
    began_at = record.began_at + wall_offset_s
    ended_at = began_at + record.phases.total_s
    root = tracer.start_span(
        "ftcore.interruption",
        context=trace.context_api.Context(),  # a tree of its own, whatever runs now
        start_time=_ns(began_at),
        attributes=_attributes(record, job),
    )
    inside = trace.set_span_in_context(root)
    for name, start, end in _phases(record, began_at):
        span = tracer.start_span(f"ftcore.{name}", context=inside, start_time=_ns(start))
        span.end(end_time=_ns(end))
    root.end(end_time=_ns(ended_at))


def _phases(record: Interruption, began_at: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each phase that took time."""
    at = began_at
    for name, seconds in asdict(record.phases).items():
        if seconds > 0:
            yield name.removesuffix("_s"), at, at + seconds
        at += seconds


def _attributes(record: Interruption, job: str) -> dict[str, str | int | float | list[str]]:
    return {
        "ftcore.job": job,
        "ftcore.cause": record.cause.value,
        "ftcore.who": list(record.who),
        "ftcore.reason": record.reason,
        "ftcore.quorum": show_id(record.quorum_id),
        "ftcore.from_step": record.from_step,
        "ftcore.members": list(record.members),
        "ftcore.steps_repeated": record.steps_repeated,
        "ftcore.stopped_s": record.stopped_s,
        "ftcore.lost_rank_s": record.lost_rank_s,
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
