"""Find where the members of a group stop calling the same thing, and decide who went wrong.

The first difference of call or call site is the place that counts: later ones, and the hang, follow
from it. Who is wrong is decided by majority; in a tie by what the group's own past predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flightrec.compare import Pair, first_difference, pair_at, pairs_of
from flightrec.lanes import Lane
from flightrec.model import Kind
from flightrec.shifts import LOOKAHEAD, Shift, find_shift, predict
from flightrec.tokens import Token, canonical, difference

SITE_DIFFERENCES_MAX = 32  # a role that calls from lines of its own does so at every step
PAST = 4096  # calls before the difference that may predict what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """At `seq` these ranks, all in the same way, did not call what the others did."""

    group: int
    seq: int
    ranks: tuple[int, ...]
    kind: Kind
    expected: Pair
    got: Pair
    shift: Shift
    agreed: int  # ranks that called what was expected
    voters: int
    reason: str = "majority"
    is_site_only: bool = False  # same operation and sizes, called from another line
    is_undecided: bool = False  # a tie that nothing broke: `ranks` are all of them


def diverge(
    group: int, lanes: Mapping[int, Lane], tokens: Sequence[Token], siblings: Sequence[Lane] = ()
) -> list[Divergence]:
    """Every divergence of one group, earliest first. Linear in calls while the members agree.

    `siblings` are lanes of other groups in the same role, which break ties.
    """
    found: list[Divergence] = []
    left = {rank: lane for rank, lane in lanes.items() if lane.seq}
    after = -1
    while len(left) > 1:
        by_site = sum(1 for d in found if d.is_site_only) < SITE_DIFFERENCES_MAX
        seq = first_difference(left.values(), after=after, with_sites=by_site)
        if seq is None:
            break
        new = _judge(group, seq, left, tokens, siblings)
        found += new
        wrong = {rank for d in new if not d.is_site_only for rank in d.ranks}
        if any(d.is_undecided for d in new):
            break
        left = {rank: lane for rank, lane in left.items() if rank not in wrong}
        after = after if wrong else seq
    return found


def _judge(
    group: int,
    seq: int,
    lanes: Mapping[int, Lane],
    tokens: Sequence[Token],
    siblings: Sequence[Lane],
) -> list[Divergence]:
    """Vote at one sequence number; each minority of one mind becomes a divergence."""
    calls = {rank: pair for rank, lane in lanes.items() if (pair := pair_at(lane, seq))}
    part = 0 if len({token for token, _ in calls.values()}) > 1 else 1
    right, reason = _right(calls, part, seq, lanes, siblings)
    if right is None:
        return [_undecided(group, seq, calls, part, tokens)]
    agreed = [rank for rank, pair in calls.items() if pair[part] == right]
    model = lanes[max(agreed, key=lambda rank: (len(lanes[rank].seq), -rank))]
    minds: dict[Pair, list[int]] = {}
    for rank in sorted(set(calls) - set(agreed)):
        if part == 0 or lanes[rank].has_sites:
            minds.setdefault(calls[rank], []).append(rank)
    return [
        _explained(group, seq, ranks, lanes, model, tokens, (len(agreed), len(calls), reason))
        for ranks in minds.values()
    ]


def _right(
    calls: Mapping[int, Pair],
    part: int,
    seq: int,
    lanes: Mapping[int, Lane],
    siblings: Sequence[Lane],
) -> tuple[int | None, str]:
    """Which call was the right one, and by what it was decided; None: by nothing."""
    votes = Counter(pair[part] for pair in calls.values()).most_common()
    if votes[0][1] > votes[1][1]:
        return votes[0][0], "majority"
    tied = {value for value, count in votes if count == votes[0][1]}
    lane = lanes[min(calls)]
    at = lane.position(seq) or 0
    expected = predict(pairs_of(lane, max(0, at - PAST), at), 1)
    if expected and expected[0][part] in tied:
        return expected[0][part], "the group's own past"
    others = Counter(p[part] for s in siblings if (p := pair_at(s, seq)) and p[part] in tied)
    ranked = others.most_common(2)
    if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
        return ranked[0][0], "groups in the same role"
    return None, ""


def _undecided(
    group: int, seq: int, calls: Mapping[int, Pair], part: int, tokens: Sequence[Token]
) -> Divergence:
    first, *_, last = sorted(set(calls.values()))
    return Divergence(
        group=group,
        seq=seq,
        ranks=tuple(sorted(calls)),
        kind=difference(tokens[last[0]], tokens[first[0]]) if part == 0 else Kind.UNKNOWN,
        expected=first,
        got=last,
        shift=Shift(0, 0),
        agreed=0,
        voters=len(calls),
        is_site_only=part == 1,
        is_undecided=part == 0,
    )


def _explained(
    group: int,
    seq: int,
    ranks: Sequence[int],
    lanes: Mapping[int, Lane],
    model: Lane,
    tokens: Sequence[Token],
    vote: tuple[int, int, str],
) -> Divergence:
    """Name the kind of one minority's divergence from what the model called."""
    wrong = lanes[max(ranks, key=lambda rank: len(lanes[rank].seq))]
    p, m = wrong.position(seq) or 0, model.position(seq) or 0
    past = pairs_of(model, max(0, m - PAST), m)
    right = pairs_of(model, m, m + LOOKAHEAD)
    mine = pairs_of(wrong, p, p + LOOKAHEAD)
    future = predict([*past, *right]) if len(right) < LOOKAHEAD else []
    shift = find_shift(mine, right, future, has_more=wrong.issued > model.issued)
    got, expected = mine[0], right[0]
    kind = _kind(got, expected, shift, past, tokens)
    return Divergence(
        group=group,
        seq=seq,
        ranks=tuple(ranks),
        kind=kind,
        expected=expected,
        got=got,
        shift=shift,
        agreed=vote[0],
        voters=vote[1],
        reason=vote[2],
        is_site_only=got[0] == expected[0] and not shift.calls,
    )


def _kind(
    got: Pair, expected: Pair, shift: Shift, past: Sequence[Pair], tokens: Sequence[Token]
) -> Kind:
    went_on = expected in past  # the others began what they had done before
    if tokens[got[0]].op.endswith("barrier") and got[0] != expected[0] and went_on:
        return Kind.UNEVEN_INPUTS  # left the loop while the others went round once more
    if tokens[expected[0]].op.endswith("barrier") and got[0] != expected[0] and got in past:
        return Kind.UNEVEN_INPUTS  # went round once more while the others left the loop
    if shift.calls:
        return Kind.SKIPPED_CALL if shift.calls > 0 else Kind.EXTRA_CALL
    if got[0] != expected[0]:
        return difference(tokens[got[0]], tokens[expected[0]])
    rooted = canonical(tokens[got[0]].op) in ("broadcast", "reduce", "gather", "scatter")
    return Kind.ROOT_MISMATCH if rooted else Kind.REDUCE_OP_MISMATCH
