"""Names of groups across replica groups, as stores and flight records know them. No torch here."""

from __future__ import annotations

from ftcore.wire.messages import show_id

CREW = "ftcore"  # what the flight recorder says of every such group


def crew_name(job: str, quorum_id: int, rank: int) -> str:
    """The group of the ranks `rank` of all replica groups in one quorum."""
    return f"{job}/{show_id(quorum_id)}/{rank}"
