"""Decide how long a group that keeps dying is held back before it may have a seat again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lighthouse.quorum import Policy

KEPT = 64  # of one group


def held_until(deaths: Sequence[float], policy: Policy) -> float:
    """When a group with these recent deaths may come in: at once up to `deaths_max` of them, then
    `hold_first_s` after the last one, twice as long with each more, `hold_most_s` at most."""
    excess = len(deaths) - policy.deaths_max
    if policy.deaths_max == 0 or excess <= 0:
        return float("-inf")
    return deaths[-1] + min(policy.hold_most_s, policy.hold_first_s * 2.0 ** (excess - 1))


class Deaths:
    """When each group died as a member. Who leaves in good order may come and go."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, ...]] = {}

    def note(self, replica_id: str, policy: Policy, now: float) -> None:
        """Only those within the window count, and are kept."""
        since = now - policy.deaths_window_s
        before = (at for at in self._of.get(replica_id, ()) if at > since)
        self._of[replica_id] = (*before, now)[-KEPT:]

    def held(self, policy: Policy) -> dict[str, float]:
        """Groups that died too often, and until when they are held back."""
        found = {name: held_until(deaths, policy) for name, deaths in self._of.items()}
        return {name: until for name, until in found.items() if until > float("-inf")}
