"""Count values in buckets, the way Prometheus wants them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Values in seconds. `bounds` are inclusive upper limits; a last bucket takes the rest."""

    def __init__(self, bounds: Sequence[float] = BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper limit as text and how many values were not above it; the last limit is `+Inf`."""
        limits = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(limits, accumulate(self._counts), strict=True))
