"""Read from the events of all groups how long each part of a recovery took. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

Event = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds since the kill, on the clock of one machine; None where it did not come to that.

    noticed_s: the first survivor ended its step. quorum_s: the last survivor had the new quorum.
    rebuilt_s: the last had built its process group. next_commit_s: the last had committed again.
    rejoined_s and the rest: seconds since the restart of the killed group.
    """

    group: str
    step: int
    noticed_s: float | None = None
    quorum_s: float | None = None
    rebuilt_s: float | None = None
    next_commit_s: float | None = None
    joined_s: float | None = None
    healed_s: float | None = None
    rejoined_s: float | None = None
    survivors_wait_s: float | None = None

    def to_json(self) -> dict[str, object]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a job went on after all its groups were lost in step `step`.

    from_step: the checkpoint it went on from; None if there was none. lost_steps: committed steps
    that were taken again. Seconds since the restart; next_commit_s: the last group had committed.
    """

    step: int
    from_step: int | None
    lost_steps: int
    restored_s: float | None = None
    next_commit_s: float | None = None

    def to_json(self) -> dict[str, object]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def resumption(
    step: int, *, killed_at: float, restarted_at: float, events: Mapping[str, Sequence[Event]]
) -> Resumption:
    """`events` are those of each group, as for `recovery`."""
    restored = [
        e
        for group in events.values()
        for e in group
        if e["event"] == "checkpoint.restored" and _at(e) >= restarted_at
    ]
    committed = [
        int(str(e["step"])) + 1
        for group in events.values()
        for e in group
        if e["event"] == "step.committed" and _at(e) < killed_at
    ]
    from_step = max((int(str(e["step"])) for e in restored), default=None)
    commits = [_first(group, restarted_at, "step.committed") for group in events.values()]
    return Resumption(
        step=step,
        from_step=from_step,
        lost_steps=max(committed, default=0) - (from_step or 0),
        restored_s=_since(restarted_at, max(map(_at, restored), default=None)),
        next_commit_s=_since(restarted_at, max(_there(commits), default=None)),
    )


def recovery(
    group: str,
    step: int,
    *,
    killed_at: float,
    restarted_at: float | None,
    events: Mapping[str, Sequence[Event]],
) -> Recovery:
    """`events` are those of each group in order of time, `at` in seconds of one clock."""
    survivors = [e for name, e in events.items() if name != group and _is_training(e, killed_at)]
    noticed = [_first(e, killed_at, "step.aborted", "step.failed") for e in survivors]
    repeated = [_first(e, killed_at, "step.repeated") for e in survivors]
    built = [_first(e, killed_at, "group.built") for e in survivors]
    commits = [
        _first(e, start, "step.committed")
        for e, start in zip(survivors, built, strict=True)
        if start
    ]
    mine = events.get(group, ())
    joined = healed = rejoined = wait = None
    if restarted_at is not None:
        joined = _first(mine, restarted_at, "manager.attached")
        healed = _first(mine, restarted_at, "heal.finished")
        rejoined = _first(mine, healed, "step.committed") if healed else None
        wait = _wait(survivors, healed)
    return Recovery(
        group=group,
        step=step,
        noticed_s=_since(killed_at, min(_there(noticed), default=None)),
        quorum_s=_since(killed_at, max(_there(repeated), default=None)),
        rebuilt_s=_since(killed_at, max(_there(built), default=None)),
        next_commit_s=_since(killed_at, max(_there(commits), default=None)),
        joined_s=_since(restarted_at, joined),
        healed_s=_since(restarted_at, healed),
        rejoined_s=_since(restarted_at, rejoined),
        survivors_wait_s=wait,
    )


def _is_training(events: Sequence[Event], at: float) -> bool:
    return any(_at(e) < at and e["event"] == "step.committed" for e in events)


def _first(events: Iterable[Event], after: float | None, *names: str) -> float | None:
    if after is None:
        return None
    return next((_at(e) for e in events if _at(e) >= after and e["event"] in names), None)


def _wait(survivors: Sequence[Sequence[Event]], healed: float | None) -> float | None:
    """How much longer than usual the step took in which the survivors served the heal."""
    if healed is None:
        return None
    waits = []
    for events in survivors:
        at = [_at(e) for e in events if e["event"] == "step.committed"]
        steps = sorted(b - a for a, b in pairwise(at))
        around = [b - a for a, b in pairwise(at) if a <= healed <= b]
        if steps and around:
            waits.append(around[0] - steps[len(steps) // 2])
    return max(waits, default=None)


def _at(event: Event) -> float:
    at = event["at"]
    assert isinstance(at, float)
    return at


def _there(times: Iterable[float | None]) -> list[float]:
    return [t for t in times if t is not None]


def _since(start: float | None, at: float | None) -> float | None:
    return None if start is None or at is None else at - start
