"""Resolve circles of waiting: who left the common order of calls that the others kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from flightrec.lanes import RETIRED_MEANS_ENDED
from flightrec.model import Finding, Kind
from flightrec.strays import own_way
from flightrec.suspects import Case, Suspect, shown
from flightrec.waits import Waits

RANKS_MAX = 256  # ranks whose order is asked for


def inversions(case: Case, waits: Waits) -> tuple[list[Suspect], list[Finding]]:
    """Two groups whose open calls some members made in one order and some in the other."""
    fronts: dict[int, int] = {}
    for calls in waits.opens.values():
        for call in calls:
            if not call.is_p2p:
                fronts[call.group] = min(call.seq, fronts.get(call.group, call.seq))
    for one, other in sorted(_shared(case, waits, fronts)):
        first = _who_goes_first(case, (one, fronts[one]), (other, fronts[other]))
        if len(set(first.values())) > 1:
            return _judged(case, (one, fronts[one]), (other, fronts[other]), first)
    return [], []


def _shared(case: Case, waits: Waits, fronts: Mapping[int, int]) -> set[tuple[int, int]]:
    """Pairs of groups, both with open calls, that share at least two members."""
    groups = sorted(fronts)[:64]
    members = {group: set(case.records.groups[group].ranks) for group in groups}
    return {
        (one, other)
        for i, one in enumerate(groups)
        for other in groups[i + 1 :]
        if len(members[one] & members[other]) > 1
    }


def _who_goes_first(case: Case, one: tuple[int, int], other: tuple[int, int]) -> dict[int, int]:
    """For each common member the group that it called first, of the two calls."""
    found = {}
    common = set(case.records.groups[one[0]].ranks) & set(case.records.groups[other[0]].ranks)
    for rank in sorted(common & set(case.records.ranks)):
        places = [_place(case, rank, *call) for call in (one, other)]
        if places[0] != places[1]:
            found[rank] = one[0] if places[0] < places[1] else other[0]
    return found


def _votes_by_role(
    case: Case, one: tuple[int, int], other: tuple[int, int]
) -> list[tuple[int, int]]:
    """The order in which all ranks called these calls in their own groups of the same roles."""
    groups = case.records.groups
    roles = [groups[call[0]].desc for call in (one, other)]
    votes: Counter[int] = Counter()
    for rank in sorted(case.records.ranks)[:RANKS_MAX]:
        own = [
            [g for g in case.lanes.of if groups[g].desc == role and rank in case.lanes.of[g]]
            for role in roles
        ]
        if roles[0] != roles[1] and len(own[0]) == len(own[1]) == 1:
            places = [
                _place(case, rank, mine[0], call[1])
                for mine, call in zip(own, (one, other), strict=True)
            ]
            if places[0] != places[1]:
                votes[one[0] if places[0] < places[1] else other[0]] += 1
    return votes.most_common()


def _place(case: Case, rank: int, group: int, seq: int) -> float:
    """Where in its records the rank made the call; infinity: it has not."""
    lane = case.lane(group, rank)
    if lane is None or lane.issued < seq:
        return float("inf")
    at = lane.position(seq)
    return lane.at[at] if at is not None else -1


def _judged(
    case: Case,
    one: tuple[int, int],
    other: tuple[int, int],
    first: Mapping[int, int],
) -> tuple[list[Suspect], list[Finding]]:
    votes = Counter(first.values()).most_common()
    if votes[0][1] == votes[1][1]:
        votes = _votes_by_role(case, one, other)
    if not votes or (len(votes) > 1 and votes[0][1] == votes[1][1]):
        return [], []
    right = votes[0][0]
    wrong = [rank for rank, group in first.items() if group != right]
    a, b = (one, other) if right == one[0] else (other, one)
    kept = [rank for rank in first if rank not in wrong]
    text = (
        f"circle: ranks {shown(kept)} wait in {case.name(a[0])} (seq {a[1]}) for ranks "
        f"{shown(wrong)}, which wait in {case.name(b[0])} (seq {b[1]}) for them"
    )
    finding = Finding(code="circle", text=text, ranks=tuple(first))
    because = (
        f"it called {case.name(b[0])} seq {b[1]} before {case.name(a[0])} seq {a[1]}; "
        f"most members called them the other way round",
    )
    suspects = []
    for rank in wrong:
        call, site = case.call_at(*b, of=rank)
        inverted = Suspect(
            rank=rank,
            kind=Kind.ORDER_INVERSION,
            group=b[0],
            seq=b[1],
            call=call,
            site=site,
            confidence=0.9,
            because=because,
        )
        suspects.append(_or_left_out(case, inverted, a))
    return suspects, [finding]


def _or_left_out(case: Case, inverted: Suspect, other: tuple[int, int]) -> Suspect:
    """A call that was left out is called in another order, too: that of the next time round. The
    rank's own past tells the two apart, or that the other call never came."""
    own = own_way(case, inverted.rank)
    if own is not None and own.kind is not Kind.ORDER_INVERSION:
        return replace(own, confidence=inverted.confidence)
    if own is not None or _place(case, inverted.rank, *other) < float("inf"):
        return inverted
    if case.op(inverted.call).endswith("barrier"):
        return replace(inverted, kind=Kind.UNEVEN_INPUTS)
    if case.records.ranks[inverted.rank].library in RETIRED_MEANS_ENDED:
        return inverted  # each call blocks: the other one might have come next
    call, _ = case.call_at(*other)
    return replace(
        inverted,
        kind=Kind.SKIPPED_CALL,
        group=other[0],
        seq=other[1],
        call=call,
        because=(*inverted.because, "it never called the latter, though it need not have waited"),
    )
