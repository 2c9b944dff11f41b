"""Decide when a holder that everyone can only watch has stopped: file and Kubernetes leases.

Such a store never ends a lease by itself. Whoever wants it remembers when it last saw the holder
change something, on its own monotonic clock, and takes over when that was too long ago.
"""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.lease.api import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The last sign of life (whatever changes with each renewal) and when it was first seen."""

    beat: object = None
    seen_at: float = 0.0

    def look(self, beat: object, now: float) -> Sighting:
        """What we know after looking at `now`. The same beat twice is no new sign of life."""
        return self if beat == self.beat else Sighting(beat=beat, seen_at=now)

    def is_over(self, timing: Timing, now: float) -> bool:
        return timing.is_over(seen_at=self.seen_at, now=now)
