"""The books of all jobs as Prometheus metrics. deploy/METRICS.md is the table of all names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lighthouse.goodput import Cause, Goodput

PHASES = {
    "noticed_s": "noticed",
    "quorum_s": "quorum",
    "group_s": "process_group",
    "heal_s": "heal",
    "first_step_s": "first_step",
    "total_s": "total",
}
Books = Mapping[str, Goodput]


def goodput_metrics(books: Books, now: float) -> Iterator[Metric]:
    """`now` is on the clock that the books were kept with."""
    yield from _steps(books)
    yield from _time(books, now)
    yield from _interruptions(books)
    yield _recovery(books)


def _steps(books: Books) -> Iterator[Metric]:
    committed = CounterMetricFamily(
        "ft_lighthouse_steps_committed", "Steps committed while this one led.", labels=["job"]
    )
    repeated = CounterMetricFamily(
        "ft_lighthouse_steps_repeated", "Steps computed more than once.", labels=["job"]
    )
    for name, book in books.items():
        committed.add_metric([name], book.steps_committed)
        repeated.add_metric([name], book.steps_repeated)
    yield from (committed, repeated)


def _time(books: Books, now: float) -> Iterator[Metric]:
    job_s = CounterMetricFamily(
        "ft_lighthouse_job_seconds",
        "Wall-clock time of a job: training, or stopped.",
        labels=["job", "state"],
    )
    rank_s = CounterMetricFamily(
        "ft_lighthouse_rank_seconds",
        "The same times ranks; missing: ranks that were away while the others trained.",
        labels=["job", "state"],
    )
    ratio = GaugeMetricFamily(
        "ft_lighthouse_goodput_ratio",
        "Effective training time ratio since this one leads: training / (training + stopped).",
        labels=["job"],
    )
    stopped = GaugeMetricFamily(
        "ft_lighthouse_waiting_seconds",
        "How long a job has computed nothing new; 0 while it trains.",
        labels=["job"],
    )
    for name, book in books.items():
        total = book.settle(now)
        job_s.add_metric([name, "training"], total.training)
        job_s.add_metric([name, "stopped"], total.stopped)
        rank_s.add_metric([name, "training"], total.rank_training)
        rank_s.add_metric([name, "stopped"], total.rank_stopped)
        rank_s.add_metric([name, "missing"], total.rank_missing)
        ratio.add_metric([name], book.ettr(now))
        stopped.add_metric([name], book.stopped_for_s(now))
    yield from (job_s, rank_s, ratio, stopped)


def _interruptions(books: Books) -> Iterator[Metric]:
    labels = ["job", "cause"]
    count = CounterMetricFamily(
        "ft_lighthouse_interruptions", "Interruptions that are over, by cause.", labels=labels
    )
    lost = CounterMetricFamily(
        "ft_lighthouse_lost_rank_seconds",
        "Seconds that interruptions stopped a job, times its ranks.",
        labels=labels,
    )
    for name, book in books.items():
        for cause in Cause:  # all of them, so that a rate has a beginning
            count.add_metric([name, cause.value], book.counts.get(cause, 0))
            lost.add_metric([name, cause.value], book.lost_rank_s.get(cause, 0.0))
    yield from (count, lost)


def _recovery(books: Books) -> Metric:
    family = HistogramMetricFamily(
        "ft_lighthouse_recovery_seconds",
        "Phases of interruptions: " + ", ".join(PHASES.values()) + ".",
        labels=["job", "phase"],
    )
    for name, book in books.items():
        for field, phase in PHASES.items():
            histogram = book.phases[field]
            family.add_metric([name, phase], histogram.cumulative(), histogram.sum)
    return family
