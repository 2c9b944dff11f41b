"""Decide whether a group's settings let it take part in one job with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftcore.wire.messages import Member, Refused


def refusal(
    ours: Mapping[str, str], theirs: Mapping[str, str], others: Sequence[Member]
) -> Refused | None:
    """Why a group with these settings cannot be in one job with the others: the first difference.

    A difference in the layout of the state is named by the group itself: it asks another one.
    """
    names = [n for n in sorted(set(ours) | set(theirs)) if ours.get(n) != theirs.get(n)]
    if not names or not others:
        return None
    name = names[0]
    what = f"{name} is {theirs.get(name)} here and {ours.get(name)} in the other replica groups"
    remedy = f"Start all replica groups of this job with the same {name}."
    compare_with = next(iter(others[0].heal_addresses), "") if name == "state layout" else ""
    return Refused(what=what, remedy=remedy, compare_with=compare_with)
