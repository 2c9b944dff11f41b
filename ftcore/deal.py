"""Decide which member of a quorum computes which shard of a step."""

from __future__ import annotations

from ftcore.data.ledger import deal
from ftcore.wire.messages import Quorum


def contributors(quorum: Quorum, *, step: int) -> list[int]:
    """The replica ranks that have a part in `step`: spares have none, nor does who heals there.

    When all active members heal, the spares that they heal from stand in for that step.
    """
    healing = quorum.healing if step == quorum.from_step else frozenset()
    whole = [rank for rank, name in enumerate(quorum.replica_ids) if name not in healing]
    active = [rank for rank in whole if quorum.replica_ids[rank] not in quorum.spares]
    return active or whole


def owners(quorum: Quorum, *, step: int, shards: int) -> tuple[int, ...]:
    """Return the replica rank that owns each shard."""
    return deal(shards=shards, participants=contributors(quorum, step=step))
