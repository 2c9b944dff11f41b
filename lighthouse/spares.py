"""Decide who of a quorum computes, and who only follows to take over: hot spares.

A spare is a member that owns no shards. It reduces and steps with the others, so its process group
is in use and its state is that of the step: promoting it costs what the death costs anyway.
"""

from __future__ import annotations

from collections.abc import Collection

from ftcore.wire.messages import Quorum


def spares_of(
    replica_ids: Collection[str],
    *,
    active_max: int,
    standing: Quorum | None = None,
    healing: Collection[str] = (),
) -> frozenset[str]:
    """The members beyond `active_max`. Who has the whole state comes before who must heal, who is
    active before who is spare; so roles change only when an active one is lost or leaves."""
    active = frozenset(standing.replica_ids) - standing.spares if standing else frozenset()

    def claim(replica_id: str) -> tuple[bool, bool, str]:
        return replica_id in healing, replica_id not in active, replica_id

    return frozenset(sorted(replica_ids, key=claim)[active_max:])
