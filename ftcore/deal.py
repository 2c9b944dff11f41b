"""Decide which member of a quorum computes which shard of a step."""

from __future__ import annotations

from ftcore.data.ledger import deal
from ftcore.wire.messages import Quorum


def owners(quorum: Quorum, *, step: int, shards: int) -> tuple[int, ...]:
    """Return the replica rank that owns each shard.

    A member that heals at `step` has no part in that step.
    """
    healing = quorum.healing if step == quorum.from_step else frozenset()
    able = [rank for rank, name in enumerate(quorum.replica_ids) if name not in healing]
    return deal(shards=shards, participants=able)
