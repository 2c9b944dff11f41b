"""Keep the times of one job: how much of its life a quorum stood, and how long recoveries took.

Pure: told of each turn with the time it happened. Phases of a recovery as the lighthouse sees it:
`noticed` from the last sign of life of a lost member until it counted as lost, `quorum` until the
new quorum was issued, `first_step` until a group reported a step committed under it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import Enum

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Phase(Enum):
    NOTICED = "noticed"
    QUORUM = "quorum"
    FIRST_STEP = "first_step"


class JobTimes:
    """The clocks of one job since this lighthouse leads."""

    def __init__(self) -> None:
        self.steps_committed = 0
        self.steps_repeated = 0
        self._highest: int | None = None
        self._stands = False
        self._since: float | None = None  # of the state it is in; None before the first quorum
        self._stood_s = 0.0
        self._broken_s = 0.0
        self._lost_at: float | None = None
        self._issued: tuple[float, int] | None = None  # when, and steps committed by then
        self._counts = {phase: [0] * (len(BOUNDS_S) + 1) for phase in Phase}
        self._last: dict[Phase, float] = {}
        self._sums = dict.fromkeys(Phase, 0.0)

    def stands(self, is_standing: bool, now: float) -> None:
        """A quorum stands and nothing is to be changed (True), or the job waits for something."""
        if self._since is None:
            if is_standing:
                self._stands, self._since = True, now
            return
        if is_standing != self._stands:
            self._add(now - self._since)
            self._stands, self._since = is_standing, now

    def committed(self, step: int, now: float) -> None:
        """A group has committed `step` steps."""
        if self._highest is not None and step > self._highest:
            self.steps_committed += step - self._highest
        self._highest = max(step, self._highest or 0)
        if self._issued is not None and step > self._issued[1]:
            self._observe(Phase.FIRST_STEP, now - self._issued[0])
            self._issued = None

    def lost(self, *, heard_at: float | None, now: float) -> None:
        """A member counts as lost."""
        if heard_at is not None:
            self._observe(Phase.NOTICED, now - heard_at)
        if self._lost_at is None:
            self._lost_at = now

    def step_failed(self) -> None:
        self.steps_repeated += 1

    def issued(self, now: float) -> None:
        """A new quorum was issued."""
        if self._lost_at is not None:
            self._observe(Phase.QUORUM, now - self._lost_at)
            self._lost_at = None
            self._issued = (now, self._highest or 0)

    def goodput(self, now: float) -> float:
        """Stood / (stood + waited) since the first quorum; 0 before it."""
        stood_s, broken_s = self._stood_s, self._broken_s
        if self._since is not None:
            stood_s += (now - self._since) * self._stands
            broken_s += (now - self._since) * (not self._stands)
        return stood_s / (stood_s + broken_s) if stood_s + broken_s > 0 else 0.0

    def summary(self, now: float) -> dict[str, object]:
        """For people: goodput, steps, and the phases of the last recovery in seconds."""
        return {
            "goodput": round(self.goodput(now), 4),
            "steps_committed": self.steps_committed,
            "steps_repeated": self.steps_repeated,
            "last_recovery": {p.value: round(s, 4) for p, s in self._last.items()},
        }

    def waiting_s(self, now: float) -> float:
        return 0.0 if self._stands or self._since is None else now - self._since

    def histogram(self, phase: Phase) -> tuple[list[int], float]:
        """Cumulative counts for BOUNDS_S and for infinity, and the sum of all values."""
        return _cumulative(self._counts[phase]), self._sums[phase]

    def _add(self, seconds: float) -> None:
        if self._stands:
            self._stood_s += seconds
        else:
            self._broken_s += seconds

    def _observe(self, phase: Phase, seconds: float) -> None:
        self._counts[phase][bisect_left(BOUNDS_S, seconds)] += 1
        self._sums[phase] += seconds
        self._last[phase] = seconds


def _cumulative(counts: Iterable[int]) -> list[int]:
    total, result = 0, []
    for count in counts:
        total += count
        result.append(total)
    return result
