"""What Prometheus reads: numbers taken at the moment of the scrape, nothing counted twice."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lighthouse.goodput_metrics import goodput_metrics
from lighthouse.host import Host
from lighthouse.quorum import Hold, Waiting
from lighthouse.server import Job
from lighthouse.status import group_state


class LighthouseCollector(Collector):
    """The numbers of one lighthouse process; a follower shows only that it follows."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        holder, lighthouse = self._host.holder, self._host.lighthouse
        yield _gauge(
            "ft_lighthouse_leader", "1 while this lighthouse leads.", lighthouse is not None
        )
        yield _gauge("ft_lighthouse_term", "Term of the leader.", holder.term if holder else 0)
        won = CounterMetricFamily("ft_lighthouse_elections_won", "Times this one began to lead.")
        won.add_metric([], self._host.elections_won)
        yield won
        jobs = lighthouse.jobs if lighthouse else {}
        yield from _jobs(jobs)
        yield from _groups(jobs)
        yield from goodput_metrics({name: job.book for name, job in jobs.items()}, time.monotonic())


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=float(value))


def _jobs(jobs: dict[str, Job]) -> Iterator[Metric]:
    number = GaugeMetricFamily(
        "ft_lighthouse_quorum_number", "Quorum id within its term.", labels=["job"]
    )
    members = GaugeMetricFamily(
        "ft_lighthouse_members", "Replica groups in the quorum.", labels=["job"]
    )
    waiting = GaugeMetricFamily(
        "ft_lighthouse_waiting", "1 for what a job waits for.", labels=["job", "reason"]
    )
    events = CounterMetricFamily(
        "ft_lighthouse_events", "Things that happened.", labels=["job", "event"]
    )
    for name, job in jobs.items():
        standing = job.core.standing
        number.add_metric([name], (standing.quorum_id & 0xFFFFFFFF) if standing else 0)
        members.add_metric([name], len(standing.members) if standing else 0)
        if isinstance(job.decision, Waiting) and job.decision.hold is not Hold.STANDING:
            waiting.add_metric([name, job.decision.hold.name.lower()], 1)
        for what, count in job.counts.items():
            events.add_metric([name, what], count)
    yield from (number, members, waiting, events)


def _groups(jobs: dict[str, Job]) -> Iterator[Metric]:
    labels = ["job", "replica_id"]
    committed = GaugeMetricFamily(
        "ft_lighthouse_committed_steps", "Steps a replica group has committed.", labels=labels
    )
    age = GaugeMetricFamily(
        "ft_lighthouse_heartbeat_age_seconds", "Since a group was last heard.", labels=labels
    )
    state = GaugeMetricFamily(
        "ft_lighthouse_group_state", "1 for the state a group is in.", labels=[*labels, "state"]
    )
    slowness = GaugeMetricFamily(
        "ft_lighthouse_slowness_ratio",
        "Time of a group's own work over that of the others; absent where not known.",
        labels=labels,
    )
    now = time.monotonic()
    for name, job in jobs.items():
        for replica_id, seat in job.core.seats.items():
            committed.add_metric([name, replica_id], seat.report.committed)
            if seat.report.slowness > 0:
                slowness.add_metric([name, replica_id], seat.report.slowness)
            age.add_metric([name, replica_id], max(0.0, now - seat.heard_at))
            state.add_metric([name, replica_id, group_state(job.core, seat)], 1)
    yield from (committed, age, state, slowness)
