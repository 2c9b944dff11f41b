"""Resolve circles of waiting: who left the common order of calls that the others kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from flightrec.compare import Pair
from flightrec.model import Finding, Kind
from flightrec.shifts import predict
from flightrec.suspects import Case, Suspect, shown
from flightrec.waits import Open, Waits

PAST = 512  # calls of a rank's own past that predict its next one
RANKS_MAX = 256  # ranks of a circle whose past is looked at


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
            return _judged(case, waits, (one, fronts[one]), (other, fronts[other]), first)
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


def _place(case: Case, rank: int, group: int, seq: int) -> float:
    """Where in its records the rank made the call; infinity: it has not."""
    lane = case.lane(group, rank)
    if lane is None or lane.issued < seq:
        return float("inf")
    at = lane.position(seq)
    return lane.at[at] if at is not None else -1


def _judged(
    case: Case,
    waits: Waits,
    one: tuple[int, int],
    other: tuple[int, int],
    first: Mapping[int, int],
) -> tuple[list[Suspect], list[Finding]]:
    votes = Counter(first.values()).most_common()
    right, by = votes[0][0], "most members"
    if votes[0][1] == votes[1][1]:
        before = Counter(
            group
            for back in (1, 2, 3)
            for group in _who_goes_first(
                case, (one[0], one[1] - back), (other[0], other[1] - back)
            ).values()
        ).most_common()
        if not before or (len(before) > 1 and before[0][1] == before[1][1]):
            return [], []
        right, by = before[0][0], "all members before"
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
        f"{by} called them the other way round",
    )
    suspects = []
    for rank in wrong:
        call, site = case.call_at(*b, of=rank)
        suspects.append(
            Suspect(
                rank=rank,
                kind=Kind.ORDER_INVERSION,
                group=b[0],
                seq=b[1],
                call=call,
                site=site,
                confidence=0.9 if by == "most members" else 0.75,
                because=because,
            )
        )
    return suspects, [finding]


def strays(case: Case, waits: Waits, circle: Collection[int]) -> list[Suspect]:
    """Members of a circle that stand at a call which their own past does not lead to."""
    astray: dict[int, tuple[Open, int]] = {}
    known = 0
    for rank in sorted(circle)[:RANKS_MAX]:
        call = waits.blocked.get(rank)
        expected = _expected(case, rank, call) if call else None
        if call is None or expected is None:
            continue
        known += 1
        if expected[0] != call.group or expected[1] != _token(case, call):
            astray[rank] = (call, expected[0])
    if not astray or (len(astray) == known and known > 1):
        return []
    return [_stray(case, rank, call, group) for rank, (call, group) in astray.items()]


def _stray(case: Case, rank: int, call: Open, skipped: int) -> Suspect:
    seq = case.issued(skipped, rank) + 1
    expected_call, _ = case.call_at(skipped, seq)
    return Suspect(
        rank=rank,
        kind=Kind.SKIPPED_CALL if skipped != call.group else Kind.WRONG_OP,
        group=skipped,
        seq=seq,
        call=expected_call,
        site=call.site,
        confidence=0.7,
        because=(
            f"it went on to {case.name(call.group)} seq {call.seq}, where its own past led to "
            f"{case.told(expected_call)} in {case.name(skipped)} (seq {seq}), "
            "at which others wait for it",
        ),
    )


def _expected(case: Case, rank: int, call: Open) -> tuple[int, int] | None:
    """Group and token of the call that the rank's past predicts at this place."""
    columns = case.records.ranks[rank].columns
    if columns is None or call.at < 1 or call.at >= 1 << 60:
        return None
    start = max(0, call.at - PAST)
    tokens = [case.lanes.token_of_call[c] for c in columns.call[start : call.at]]
    keys = _numbered(
        zip(columns.group[start : call.at], tokens, columns.site[start : call.at], strict=True)
    )
    following = predict(keys[1], 1)
    return keys[0][following[0][0]][:2] if following else None


def _numbered(
    keys: Iterable[tuple[int, int, int]],
) -> tuple[list[tuple[int, int, int]], Sequence[Pair]]:
    table: dict[tuple[int, int, int], int] = {}
    pairs = [(table.setdefault(key, len(table)), 0) for key in keys]
    return list(table), pairs


def _token(case: Case, call: Open) -> int:
    return case.lanes.token_of_call[call.call] if call.call >= 0 else -1
