"""Write the Grafana dashboards beside this file: `python deploy/grafana/build.py [FOLDER]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SECONDS, RATIO, BYTES, COUNT, RATE = "s", "percentunit", "bytes", "short", "ops"
WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: `queries` maps a legend to an expression. `limits` colour the value."""

    title: str
    says: str
    queries: dict[str, str]
    unit: str = COUNT
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    limits: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    stacked: bool = False
    max: float | None = None


GOOD_IS_HIGH = ((None, "red"), (0.9, "orange"), (0.97, "green"))
JOB = 'job=~"$job"'
FLEET = [
    Panel(
        title="Leaders",
        says="Exactly one lighthouse leads. None: jobs train on until a group changes.",
        queries={"leaders": "sum(ft_lighthouse_leader)"},
        kind="stat",
        width=4,
        height=5,
        limits=((None, "red"), (1, "green"), (2, "red")),
    ),
    Panel(
        title="Term",
        says="Grows by one or more with each failover.",
        queries={"term": "max(ft_lighthouse_term)"},
        kind="stat",
        width=4,
        height=5,
    ),
    Panel(
        title="Jobs",
        says="Jobs with a quorum.",
        queries={"jobs": "count(max by (job) (ft_lighthouse_members) > 0)"},
        kind="stat",
        width=4,
        height=5,
    ),
    Panel(
        title="Replica groups",
        says="In the quorums of all jobs.",
        queries={"groups": "sum(max by (job) (ft_lighthouse_members))"},
        kind="stat",
        width=4,
        height=5,
    ),
    Panel(
        title="ETTR, all jobs, last hour",
        says="Time in which jobs trained / time that they had (arXiv 2410.21680).",
        queries={
            "ETTR": 'sum(rate(ft_lighthouse_job_seconds_total{state="training"}[1h]))'
            " / sum(rate(ft_lighthouse_job_seconds_total[1h]))"
        },
        unit=RATIO,
        kind="gauge",
        width=8,
        height=5,
        limits=GOOD_IS_HIGH,
        max=1,
    ),
    Panel(
        title="ETTR by job, last hour",
        says="Below 0.9 for 15 minutes raises JobGoodputLow.",
        queries={"{{job}}": "ft:ettr:ratio_rate1h"},
        unit=RATIO,
        width=12,
        limits=GOOD_IS_HIGH,
        max=1,
    ),
    Panel(
        title="Goodput by job, last hour",
        says="The same weighed by ranks: groups that are away count, too.",
        queries={"{{job}}": "ft:goodput:ratio_rate1h"},
        unit=RATIO,
        width=12,
        limits=GOOD_IS_HIGH,
        max=1,
    ),
    Panel(
        title="Groups in the quorum",
        says="Steps down when a group is lost, up when it is back.",
        queries={"{{job}}": "max by (job) (ft_lighthouse_members)"},
    ),
    Panel(
        title="Stopped for",
        says="How long a job has computed nothing new. Above 2 minutes raises JobStopped.",
        queries={"{{job}}": "max by (job) (ft_lighthouse_waiting_seconds)"},
        unit=SECONDS,
    ),
    Panel(
        title="Steps per second",
        says="New steps only.",
        queries={"{{job}}": "ft:steps_committed:rate5m"},
        unit=RATE,
    ),
    Panel(
        title="Interruptions per hour",
        says="By cause. joined and left are planned: the others train on meanwhile.",
        queries={"{{cause}}": "sum by (cause) (increase(ft_lighthouse_interruptions_total[1h]))"},
        stacked=True,
        width=12,
    ),
    Panel(
        title="Rank-hours lost, last day",
        says="Stopped time times ranks, by job and cause.",
        queries={"{{job}} {{cause}}": "ft:lost_rank_hours:increase1d"},
        stacked=True,
        width=12,
    ),
]
ONE_JOB = [
    Panel(
        title="ETTR, last hour",
        says="Time in which the job trained / time that it had (arXiv 2410.21680).",
        queries={"{{job}}": f"ft:ettr:ratio_rate1h{{{JOB}}}"},
        unit=RATIO,
        kind="gauge",
        width=6,
        height=5,
        limits=GOOD_IS_HIGH,
        max=1,
    ),
    Panel(
        title="Goodput, last hour",
        says="The same weighed by ranks.",
        queries={"{{job}}": f"ft:goodput:ratio_rate1h{{{JOB}}}"},
        unit=RATIO,
        kind="gauge",
        width=6,
        height=5,
        limits=GOOD_IS_HIGH,
        max=1,
    ),
    Panel(
        title="Groups in the quorum",
        says="Members at present.",
        queries={"{{job}}": f"max by (job) (ft_lighthouse_members{{{JOB}}})"},
        kind="stat",
        width=4,
        height=5,
    ),
    Panel(
        title="Steps committed",
        says="The furthest group.",
        queries={"{{job}}": f"max by (job) (ft_lighthouse_committed_steps{{{JOB}}})"},
        kind="stat",
        width=4,
        height=5,
    ),
    Panel(
        title="Stopped for",
        says="How long nothing new was computed.",
        queries={"{{job}}": f"max by (job) (ft_lighthouse_waiting_seconds{{{JOB}}})"},
        unit=SECONDS,
        kind="stat",
        width=4,
        height=5,
        limits=((None, "green"), (10, "orange"), (120, "red")),
    ),
    Panel(
        title="Steps by group",
        says="Groups of one quorum are never more than a step apart.",
        queries={"{{replica_id}}": f"ft_lighthouse_committed_steps{{{JOB}}}"},
        width=12,
    ),
    Panel(
        title="State of the groups",
        says="member, healing, waiting, leaving, failed or joining.",
        queries={"{{replica_id}} {{state}}": f"ft_lighthouse_group_state{{{JOB}}}"},
        kind="state-timeline",
        width=12,
    ),
    Panel(
        title="Recovery phases, median",
        says="noticed, quorum, process group, heal, first step, one after the other.",
        queries={"{{phase}}": f'ft:recovery_seconds:p50_6h{{{JOB}, phase!="total"}}'},
        unit=SECONDS,
        stacked=True,
        width=12,
    ),
    Panel(
        title="Recovery, 99th percentile",
        says="`total` above a minute raises JobRecoversSlowly.",
        queries={"{{phase}}": f"ft:recovery_seconds:p99_6h{{{JOB}}}"},
        unit=SECONDS,
        width=12,
    ),
    Panel(
        title="Where the rank-seconds go",
        says="training, stopped, and missing: ranks away while the others trained.",
        queries={
            "{{state}}": f"sum by (state) (rate(ft_lighthouse_rank_seconds_total{{{JOB}}}[5m]))"
        },
        stacked=True,
    ),
    Panel(
        title="Interruptions",
        says="In the last hour, by cause.",
        queries={
            "{{cause}}": "sum by (cause) "
            f"(increase(ft_lighthouse_interruptions_total{{{JOB}}}[1h]))"
        },
        stacked=True,
    ),
    Panel(
        title="Steps repeated",
        says="In the last hour: failed steps, and steps since the checkpoint that it went back to.",
        queries={"{{job}}": f"ft:steps_repeated:increase1h{{{JOB}}}"},
    ),
    Panel(
        title="Age of the last sign of life",
        says="A group that is silent for the heartbeat timeout counts as lost.",
        queries={"{{replica_id}}": f"ft_lighthouse_heartbeat_age_seconds{{{JOB}}}"},
        unit=SECONDS,
        width=12,
    ),
    Panel(
        title="Events",
        says="Changes per second: quorums, losses, changes started.",
        queries={"{{event}}": f"sum by (event) (rate(ft_lighthouse_events_total{{{JOB}}}[5m]))"},
        unit=RATE,
        width=12,
    ),
]
CHECKPOINTS = [
    Panel(
        title="Age of the newest durable checkpoint",
        says="What would be lost if all groups died now. Above an hour raises CheckpointOld.",
        queries={
            "{{tier}}": f"max by (tier) (time() - ft_ckpt_durable_created_unix_seconds{{{JOB}}})"
        },
        unit=SECONDS,
        width=12,
    ),
    Panel(
        title="Newest durable step",
        says="By tier.",
        queries={"{{tier}}": f"max by (tier) (ft_ckpt_durable_step{{{JOB}}})"},
        width=12,
    ),
    Panel(
        title="From save to durable",
        says="Of the newest step, by tier.",
        queries={"{{tier}}": f"max by (tier) (ft_ckpt_durable_seconds{{{JOB}}})"},
        unit=SECONDS,
    ),
    Panel(
        title="Training time taken by saves",
        says="Share of the last hour. Above 5 % raises CheckpointCostsTooMuch.",
        queries={"{{job}}": f"ft:ckpt_overhead:ratio_rate1h{{{JOB}}}"},
        unit=RATIO,
        limits=((None, "green"), (0.02, "orange"), (0.05, "red")),
    ),
    Panel(
        title="Saves and failures",
        says="In the last half hour, by tier.",
        queries={
            "durable {{tier}}": f"sum by (tier) (increase(ft_ckpt_saves_total{{{JOB}}}[30m]))",
            "failed {{tier}} {{reason}}": "sum by (tier, reason) "
            f"(increase(ft_ckpt_failures_total{{{JOB}}}[30m]))",
        },
    ),
    Panel(
        title="Throughput",
        says="Bytes per second of work, by phase and tier, over all daemons.",
        queries={
            "{{phase}} {{tier}}": f"sum by (phase, tier) (rate(ft_ckpt_bytes_total{{{JOB}}}[5m]))"
        },
        unit="Bps",
    ),
    Panel(
        title="Staging speed",
        says="Bytes per second while trainers copied.",
        queries={
            "{{job}}": f"sum by (job) (increase(ft_ckpt_staging_bytes_total{{{JOB}}}[1h]))"
            f" / sum by (job) (increase(ft_ckpt_staging_seconds_total{{{JOB}}}[1h]))"
        },
        unit="Bps",
    ),
    Panel(
        title="Staging memory",
        says="Held by all daemons.",
        queries={"{{job}}": f"sum by (job) (ft_ckpt_memory_bytes{{{JOB}}})"},
        unit=BYTES,
    ),
    Panel(
        title="Size of a step",
        says="Stored bytes of the newest durable step, by tier.",
        queries={"{{tier}}": f"max by (tier) (ft_ckpt_step_bytes{{{JOB}}})"},
        unit=BYTES,
    ),
    Panel(
        title="Seconds of work by phase",
        says="Per second, summed over threads and daemons.",
        queries={"{{phase}}": f"sum by (phase) (rate(ft_ckpt_seconds_total{{{JOB}}}[5m]))"},
        width=16,
    ),
]
DASHBOARDS = {
    "fleet": ("ftcore: fleet", FLEET, ""),
    "job": ("ftcore: one job", ONE_JOB, "ft_lighthouse_members"),
    "checkpoints": ("ftcore: checkpoints", CHECKPOINTS, "ft_ckpt_durable_step"),
}


def dashboard(name: str) -> dict[str, object]:
    title, panels, job_metric = DASHBOARDS[name]
    variables: list[dict[str, object]] = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    ]
    if job_metric:
        variables.append(_job_variable(job_metric))
    return {
        "uid": f"ftcore-{name}",
        "title": title,
        "tags": ["ftcore"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "panels": list(_placed(panels)),
    }


def _job_variable(metric: str) -> dict[str, object]:
    return {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({metric}, job)", "refId": "job"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(panels: Iterable[Panel]) -> Iterable[dict[str, object]]:
    """Left to right, a new row when the next panel does not fit."""
    x = y = row = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, row = 0, y + row, 0
        yield _panel(panel, number, x, y)
        x, row = x + panel.width, max(row, panel.height)


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, object]:
    steps = [{"value": value, "color": color} for value, color in panel.limits]
    defaults: dict[str, object] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.max is not None:
        defaults["max"] = panel.max
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        fill = 40 if panel.stacked else 10
        defaults["custom"] = {"fillOpacity": fill, "stacking": stacking, "showPoints": "never"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": legend,
                "instant": panel.kind in ("stat", "gauge"),
                "range": panel.kind not in ("stat", "gauge"),
            }
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name in DASHBOARDS:
        text = json.dumps(dashboard(name), indent=1) + "\n"
        (folder / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
