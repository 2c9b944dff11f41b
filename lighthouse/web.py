"""What people and Prometheus ask over HTTP: /healthz, /status, /metrics."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse.quorum import Hold, Waiting
from lighthouse.server import Lighthouse
from lighthouse.status import group_state


class LighthouseCollector(Collector):
    """Reads the numbers at the moment of the scrape: nothing is counted twice."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self._lighthouse = lighthouse

    def collect(self) -> Iterator[Metric]:
        term = GaugeMetricFamily("ft_lighthouse_term", "Term of this lighthouse.")
        term.add_metric([], self._lighthouse.records.term)
        yield term
        yield from self._jobs()
        yield from self._groups()

    def _jobs(self) -> Iterator[Metric]:
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
        for name, job in self._lighthouse.jobs.items():
            standing = job.core.standing
            number.add_metric([name], (standing.quorum_id & 0xFFFFFFFF) if standing else 0)
            members.add_metric([name], len(standing.members) if standing else 0)
            if isinstance(job.decision, Waiting) and job.decision.hold is not Hold.STANDING:
                waiting.add_metric([name, job.decision.hold.name.lower()], 1)
            for what, count in job.counts.items():
                events.add_metric([name, what], count)
        yield from (number, members, waiting, events)

    def _groups(self) -> Iterator[Metric]:
        labels = ["job", "replica_id"]
        committed = GaugeMetricFamily(
            "ft_lighthouse_committed_steps", "Steps a replica group has committed.", labels=labels
        )
        state = GaugeMetricFamily(
            "ft_lighthouse_group_state", "1 for the state a group is in.", labels=[*labels, "state"]
        )
        for name, job in self._lighthouse.jobs.items():
            for replica_id, seat in job.core.seats.items():
                committed.add_metric([name, replica_id], seat.report.committed)
                state.add_metric([name, replica_id, group_state(job.core, seat)], 1)
        yield from (committed, state)


def make_app(lighthouse: Lighthouse) -> web.Application:
    registry = CollectorRegistry()
    registry.register(LighthouseCollector(lighthouse))

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def status(_: web.Request) -> web.Response:
        return web.json_response(lighthouse.status())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    app = web.Application()
    routes = [("/healthz", healthz), ("/status", status), ("/metrics", metrics)]
    app.add_routes([web.get(path, handler) for path, handler in routes])
    return app
