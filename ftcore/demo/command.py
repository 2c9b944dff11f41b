"""`ftcore demo`: the same job with and without failures, and whether the bits are equal."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from ftcore.base.cli import print_json
from ftcore.base.errors import BadSetting
from ftcore.demo.processes import ALL, Kill, Lighthouse, Run, checkpoint_folder, run_job
from ftcore.demo.timeline import Event, Recovery, Resumption, recovery, resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo proves. Hashes are SHA-256 of the final weights."""

    failed: Run
    unfailed: Run
    recoveries: list[Recovery]
    resumptions: list[Resumption]

    @property
    def sha_failed(self) -> str:
        return _one_sha(self.failed)

    @property
    def sha_unfailed(self) -> str:
        return _one_sha(self.unfailed)

    @property
    def is_equal(self) -> bool:
        return self.sha_failed == self.sha_unfailed

    @property
    def max_loss_gap(self) -> float:
        here, there = self.failed.losses, self.unfailed.losses
        return max((abs(here[s] - there[s]) for s in here.keys() & there.keys()), default=0.0)

    def to_json(self) -> dict[str, object]:
        return {
            "equal": self.is_equal,
            "sha_failed": self.sha_failed,
            "sha_unfailed": self.sha_unfailed,
            "max_loss_gap": self.max_loss_gap,
            "steps": len(self.failed.losses),
            "recoveries": [r.to_json() for r in self.recoveries],
            "resumptions": [r.to_json() for r in self.resumptions],
        }


def _one_sha(run: Run) -> str:
    """The hash that all groups share; if they differ, all of them."""
    return "/".join(sorted({group.sha for group in run.groups.values()}))


def parse_kill(text: str, groups: int, steps: int) -> Kill:
    group, _, step = text.partition("@")
    names = [f"r{i}" for i in range(groups)]
    name = f"r{group}" if group.isdigit() else group
    if name not in (*names, ALL) or not step.isdigit() or not 0 <= int(step) < steps:
        raise BadSetting(
            f"--kill {text!r} names no group and step of this run",
            remedy=f"Write GROUP@STEP, for example 1@{steps // 3}, with a group of "
            f"{', '.join(names)} or {ALL}, and a step below {steps}.",
        )
    return Kill(name, int(step))


@click.command()
@click.option("--groups", default=3, show_default=True, help="Replica groups, one process each.")
@click.option("--steps", default=120, show_default=True, help="Optimizer steps.")
@click.option("--shards", type=int, help="Parts of a step's batch. [default: the groups]")
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="GROUP@STEP",
    help="'all' for GROUP kills all groups and the checkpoint daemon. [default: 1@STEPS/3]",
)
@click.option(
    "--checkpoint-every",
    type=int,
    help="Steps from one checkpoint to the next. [default: STEPS/10 if all groups are killed, "
    "else no checkpoints]",
)
@click.option("--restart-after", default=1.0, show_default=True, help="Seconds after the kill.")
@click.option("--step-time", default=0.1, show_default=True, help="Least seconds of a step.")
@click.option("--mode", type=click.Choice(["exact", "fast"]), default="exact", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write loss curves to this PNG.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for each of both runs.")
@click.option("--log-level", default="ERROR", help="Of the lighthouse and the managers.")
def demo(
    groups: int,
    steps: int,
    shards: int | None,
    kills: tuple[str, ...],
    checkpoint_every: int | None,
    restart_after: float,
    step_time: float,
    mode: str,
    device: str,
    as_json: bool,
    plot: Path | None,
    timeout: float,
    log_level: str,
) -> None:
    """Train, kill a group in mid-step, go on, heal it, and compare with a run without failures.

    Exit code 1 when the final weights differ (in fast mode: when the losses are 0.01 apart).
    """
    if groups < 1 or steps < 1:
        raise BadSetting(f"groups is {groups} and steps is {steps}, both must be at least 1")
    default = [f"1@{steps // 3}"] if groups > 1 else []
    planned = [parse_kill(text, groups, steps) for text in kills or default]
    config = {
        "groups": groups,
        "shards": shards or groups,
        "steps": steps,
        "mode": mode,
        "step_time_s": step_time,
        "device": device,
    }
    names = [f"r{i}" for i in range(groups)]
    if checkpoint_every is None and any(k.group == ALL for k in planned):
        checkpoint_every = max(1, steps // 10)

    def run(title: str, kills: list[Kill]) -> Run:
        _say(f"\n{title}", as_json)
        with tempfile.TemporaryDirectory(prefix="ftcore-demo-") as folder:
            least = max(1, groups - len({k.group for k in planned} - {ALL}))
            with (
                Lighthouse(Path(folder), replicas_min=least, log_level=log_level) as lighthouse,
                checkpoint_folder() as place,
            ):
                saving = _saving(place, checkpoint_every) if checkpoint_every and kills else {}
                return run_job(
                    {**config, **saving, "lighthouse": lighthouse.address},
                    names,
                    kills=kills,
                    restart_after_s=restart_after,
                    seen=_table(as_json),
                    timeout_s=timeout,
                    log_level=log_level,
                )

    failed = run(f"{groups} groups, {steps} steps, with kill -9", planned)
    unfailed = run("The same job without failures", [])
    outcome = Outcome(
        failed=failed,
        unfailed=unfailed,
        recoveries=_recoveries(failed),
        resumptions=_resumptions(failed),
    )
    _report(outcome, as_json)
    if plot is not None:
        from ftcore.demo.plot import draw

        draw(outcome.failed, outcome.unfailed, plot)
        _say(f"loss curves: {plot}", as_json)
    good = outcome.is_equal if mode == "exact" else outcome.max_loss_gap < 0.01
    sys.exit(0 if good else 1)


def _saving(folder: Path, every: int) -> dict[str, object]:
    return {
        "checkpoints": str(folder / "run"),
        "checkpoint_every": every,
        "daemon_folder": str(folder / "daemon"),
    }


def _resumptions(run: Run) -> list[Resumption]:
    events = {name: group.events for name, group in run.groups.items()}
    return [
        resumption(k.kill.step, killed_at=k.killed_at, restarted_at=k.restarted_at, events=events)
        for k in run.killed
        if k.kill.group == ALL and k.restarted_at is not None
    ]


def _recoveries(run: Run) -> list[Recovery]:
    events = {name: group.events for name, group in run.groups.items()}
    return [
        recovery(
            killed.kill.group,
            killed.kill.step,
            killed_at=killed.killed_at,
            restarted_at=killed.restarted_at,
            events=events,
        )
        for killed in run.killed
        if killed.kill.group != ALL
    ]


def _say(text: str, as_json: bool) -> None:
    click.echo(text, err=as_json)


def _table(as_json: bool) -> Callable[[str, Event], None]:
    """One line per step and group, and one for whatever else happens."""
    _say(f"{'step':>5}  {'group':5}  {'loss':>7}  {'quorum':>6}  {'members':12}  state", as_json)
    notable = {
        "step.aborted": "abort: {reason}",
        "step.failed": "step failed, will be repeated",
        "checkpoint.saved": "saves step {step}",
        "checkpoint.restored": "restored step {step} in {seconds:.3f} s",
        "heal.finished": "healed {bytes} bytes in {seconds:.3f} s",
        "started": "process started",
        "ended": "process ended with code {code}",
    }

    def show(name: str, event: Event) -> None:
        kind = str(event["event"])
        if kind == "step.committed":
            members = event["members"]
            assert isinstance(members, list)
            _say(
                f"{event['step']:>5}  {name:5}  {event['loss']:7.4f}  {event['quorum']:>6}  "
                f"{' '.join(members):12}  committed",
                as_json,
            )
        elif kind in notable:
            _say(
                f"{'':5}  {name:5}  {'':7}  {'':6}  {'':12}  {notable[kind].format(**event)}",
                as_json,
            )

    return show


def _report(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        print_json(outcome.to_json())
        return
    click.echo()
    for found in outcome.recoveries:
        _report_recovery(found)
    for resumed in outcome.resumptions:
        _report_resumption(resumed)
    click.echo(f"weights with failures     sha256 {outcome.sha_failed}")
    click.echo(f"weights without failures  sha256 {outcome.sha_unfailed}")
    click.echo(f"largest loss difference   {outcome.max_loss_gap:g}")
    same = "equal to the last bit" if outcome.is_equal else "NOT equal"
    click.echo(f"the final weights are {same}")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _report_resumption(found: Resumption) -> None:
    click.echo(f"all groups and the checkpoint daemon killed in step {found.step}")
    click.echo(
        f"  restarted → restored step {found.from_step} {_ms(found.restored_s)} → next committed "
        f"step {_ms(found.next_commit_s)}; {found.lost_steps} steps were taken again"
    )


def _report_recovery(found: Recovery) -> None:
    click.echo(f"{found.group} killed in step {found.step}")
    click.echo(
        f"  survivors: killed → noticed {_ms(found.noticed_s)} → new quorum {_ms(found.quorum_s)}"
        f" → group rebuilt {_ms(found.rebuilt_s)} → next committed step {_ms(found.next_commit_s)}"
    )
    click.echo(
        f"  {found.group}: restarted → joined {_ms(found.joined_s)} → healed {_ms(found.healed_s)}"
        f" → voting {_ms(found.rejoined_s)}; the others waited {_ms(found.survivors_wait_s)} for it"
    )
