"""Decide how long to wait so that a stream of bytes keeps to a bandwidth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """A bandwidth shared by several connections. `bytes_per_s` of None is no limit."""

    bytes_per_s: float | None
    free_at: float = 0.0  # when all bytes so far have had their time

    def delay(self, nbytes: int, now: float) -> float:
        """Reserve time for `nbytes` and return the seconds to wait before moving them."""
        if self.bytes_per_s is None:
            return 0.0
        start = max(now, self.free_at)
        self.free_at = start + nbytes / self.bytes_per_s
        return start - now
