"""Writes all calls as a trace that ui.perfetto.dev opens: a process per rank, a track per group.

The format is the Chrome trace-event JSON. A call runs from its issue to its completion, as far as
the recorder knows it; an open call runs to the end of the trace. Arrows join the ranks of the call
that the verdict is about.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flightrec.model import Entry, Records, Report
from flightrec.render.board import call_text
from flightrec.render.words import user_frame


@dataclass(frozen=True, slots=True)
class _Span:
    """The time that the trace covers, in wall-clock nanoseconds."""

    start: int
    end: int


def write_perfetto(path: str, records: Records, report: Report) -> int:
    """Write a gzipped trace and return the number of events. The same input gives the same bytes.

    Reads the dumps again, one rank at a time, so that memory holds one rank's entries only.
    """
    span = _span(records)
    count = 0
    with Path(path).open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in _events(records, report, span):
            text = json.dumps(event, separators=(",", ":"), sort_keys=True)
            file.write((b",\n" if count else b"") + text.encode())
            count += 1
        file.write(b"\n]}\n")
    return count


def _span(records: Records) -> _Span:
    times = [
        at
        for record in records.ranks.values()
        if record.columns is not None and len(record.columns)
        for at in (min(record.columns.created_ns), max(record.columns.created_ns))
        if at > 0
    ]
    if not times:
        return _Span(0, 0)
    return _Span(min(times), max(times) + max(1_000_000, (max(times) - min(times)) // 20))


def _events(records: Records, report: Report, span: _Span) -> Iterator[dict[str, object]]:
    guilty = {culprit.rank for culprit in report.culprits}
    for rank in sorted(records.ranks):
        name = f"rank {rank}" + (" (culprit)" if rank in guilty else "")
        yield _meta("process_name", rank, 0, name=name)
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        groups: set[int] = set()
        for entry in records.entries(rank):
            if entry.group not in groups:
                groups.add(entry.group)
                label = str(records.groups[entry.group])
                yield _meta("thread_name", rank, entry.group + 1, name=label)
            yield _call(rank, entry, span)
            yield from _arrow(rank, entry, records, report, span)


def _meta(kind: str, rank: int, track: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


def _call(rank: int, entry: Entry, span: _Span) -> dict[str, object]:
    number = f"p2p {entry.p2p_seq}" if entry.is_p2p else f"#{entry.seq}"
    frame = user_frame(entry.site)
    args: dict[str, object] = {
        "call": call_text(entry.call),
        "state": entry.state,
        "record": entry.record_id,
        "seq": entry.seq,
    }
    if frame is not None:
        args["source"] = str(frame)
    if entry.thread:
        args["thread"] = entry.thread
    return {
        "ph": "X",
        "name": f"{entry.call.op} {number}",
        "cat": "open" if not entry.is_completed and not entry.is_retired else entry.state,
        "pid": rank,
        "tid": entry.group + 1,
        "ts": _micros(entry.created_ns, span),
        "dur": max(1.0, (_end(entry, span) - entry.created_ns) / 1000),
        "args": args,
    }


def _end(entry: Entry, span: _Span) -> int:
    """Completion as discovered by the watchdog; a measured duration is surer, if it is there."""
    if entry.duration_ms is not None:
        return int((entry.started_ns or entry.created_ns) + entry.duration_ms * 1e6)
    if entry.completed_ns:
        return entry.completed_ns
    return entry.created_ns + 1000 if entry.is_completed or entry.is_retired else span.end


def _micros(ns: int, span: _Span) -> float:
    return round((ns - span.start) / 1000, 3)


def _arrow(
    rank: int, entry: Entry, records: Records, report: Report, span: _Span
) -> Iterator[dict[str, object]]:
    """Bind the same call of all ranks; the lowest rank that issued it is the start."""
    if entry.is_p2p:
        return
    group = records.groups[entry.group]
    for culprit in report.culprits:
        if culprit.seq == entry.seq and culprit.group in (str(group), group.name):
            first = min(r for r in group.ranks if r in records.ranks)
            yield {
                "ph": "s" if rank == first else "f",
                "bp": "e",
                "id": entry.group * 1_000_003 + entry.seq,
                "name": "same call",
                "cat": "match",
                "pid": rank,
                "tid": entry.group + 1,
                "ts": _micros(entry.created_ns, span),
            }
            return
