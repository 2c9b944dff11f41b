"""Decide which member of a quorum computes which shard of a step."""

from __future__ import annotations

from ftcore.wire.messages import Quorum


def owners(quorum: Quorum, *, step: int, shards: int) -> tuple[int, ...]:
    """Return the replica rank that owns each shard.

    A member that heals at `step` has no part in that step; all others take turns, so that no one
    has more than one shard more than another.
    """
    healing = quorum.healing if step == quorum.from_step else frozenset()
    able = [rank for rank, name in enumerate(quorum.replica_ids) if name not in healing]
    return tuple(able[shard % len(able)] for shard in range(shards))
