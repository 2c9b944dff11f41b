"""Decide which member of a quorum computes which shard of a step."""

from __future__ import annotations

from ftcore.data.ledger import deal
from ftcore.wire.messages import Quorum


def contributors(quorum: Quorum, *, step: int) -> list[int]:
    """The replica ranks that have a part in `step`: a member that heals there has none."""
    healing = quorum.healing if step == quorum.from_step else frozenset()
    return [rank for rank, name in enumerate(quorum.replica_ids) if name not in healing]


def owners(quorum: Quorum, *, step: int, shards: int) -> tuple[int, ...]:
    """Return the replica rank that owns each shard."""
    return deal(shards=shards, participants=contributors(quorum, step=step))
