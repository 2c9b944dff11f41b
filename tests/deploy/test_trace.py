"""A recovery as spans, through the real OpenTelemetry SDK into memory."""

import itertools
import subprocess
import sys

import pytest

from lighthouse.goodput import Cause, Interruption, Phases
from tests.deploy.tools import ROOT

RECORD = Interruption(
    number=1,
    cause=Cause.LOST,
    who=("r1",),
    reason="died",
    began_at=100.0,
    noticed_at=100.5,
    highest=7,
    issued_at=100.6,
    quorum_id=(3 << 32) + 7,
    from_step=7,
    members=("r0", "r2"),
    ranks=24,
    steps_repeated=1,
    phases=Phases(noticed_s=0.5, quorum_s=0.1, group_s=0.2, first_step_s=0.3),
    stopped_s=1.1,
)


@pytest.fixture(scope="module")
def exporter():
    trace = pytest.importorskip("opentelemetry.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter):
    from lighthouse.trace import trace_interruption

    exporter.clear()
    trace_interruption(RECORD, job="llm", wall_offset_s=1000.0)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_recovery_is_one_tree(spans):
    root = spans.pop("ftcore.interruption")
    assert root.parent is None
    assert {s.parent.span_id for s in spans.values()} == {root.context.span_id}
    assert list(spans) == ["ftcore.noticed", "ftcore.quorum", "ftcore.group", "ftcore.first_step"]


def test_the_phases_fill_it_from_begin_to_end_without_gaps(spans):
    root = spans.pop("ftcore.interruption")
    phases = list(spans.values())
    assert root.start_time == phases[0].start_time == 1_100_000_000_000
    for before, after in itertools.pairwise(phases):
        assert before.end_time == after.start_time
    assert phases[-1].end_time == root.end_time


def test_it_says_what_happened_to_whom(spans):
    said = spans["ftcore.interruption"].attributes
    assert (said["ftcore.job"], said["ftcore.cause"], said["ftcore.who"]) == (
        "llm",
        "lost",
        ("r1",),
    )
    assert said["ftcore.quorum"] == "3.7" and said["ftcore.steps_repeated"] == 1


def test_without_opentelemetry_nothing_happens():
    code = """
import sys
sys.modules["opentelemetry"] = None  # importing it fails
from tests.deploy.test_trace import RECORD
from lighthouse.trace import trace_interruption
trace_interruption(RECORD, job="llm", wall_offset_s=0.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
