"""Find the rank that left its own way: a step from call to call that it never took before.

Training repeats itself. After the same few calls comes the same next call; a rank for which another
one comes, while the other ranks go on as ever, left the order that all had kept. This sees across
groups, where comparing the members of one group sees nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from flightrec.lanes import RETIRED_MEANS_ENDED
from flightrec.model import Kind
from flightrec.suspects import Case, Suspect

PAST = 2048  # calls of each rank that are looked at
RANKS_MAX = 256
CONTEXTS = (6, 3)  # how many calls must repeat; the longer is believed first

Step = tuple[int, int, int]  # group, token, site


@dataclass(frozen=True, slots=True)
class Stray:
    """At position `at` of its records the rank did not make the call that usually came."""

    rank: int
    at: int
    usual: Step
    usual_after: Step | None  # what usually came after the usual call
    is_known: bool  # the call that it made instead is one that it had made before


def stray_suspects(
    case: Case, ranks: Collection[int], *, only_known: bool = False
) -> list[Suspect]:
    """Those of `ranks` that alone left their own way; nobody when most of them did. `only_known`:
    only to a call that they had made before, for the first end of a loop is news to everybody."""
    looked = sorted(rank for rank in ranks if rank in case.records.ranks)[:RANKS_MAX]
    for context in CONTEXTS:
        found = {
            rank: [s for s in _strays(case, rank, context) if s.is_known or not only_known]
            for rank in looked
        }
        marks = Counter(
            mark for strays in found.values() for mark in {_mark(case, s) for s in strays}
        )
        alone: dict[int, Stray] = {}
        for rank, strays in found.items():
            odd = [s for s in strays if 2 * marks[_mark(case, s)] < max(2.5, len(looked))]
            if odd:
                alone[rank] = odd[-1]
        if alone and len(alone) <= max(2, len(looked) // 8) and 2 * len(alone) <= len(looked):
            return [_suspect(case, stray) for stray in alone.values()]
    return []


def own_way(case: Case, rank: int) -> Suspect | None:
    """How the rank last left its own way for a call that it had made before; None: it did not."""
    for context in CONTEXTS:
        known = [stray for stray in _strays(case, rank, context) if stray.is_known]
        if known:
            return _suspect(case, known[-1])
    return None


def _mark(case: Case, stray: Stray) -> tuple[str, int, int]:
    """Where in its role's common way the stray lies: equal for all who do the same there."""
    columns = case.records.ranks[stray.rank].columns
    assert columns is not None
    call = columns.call[stray.at]
    desc = case.records.groups[columns.group[stray.at]].desc
    return desc, columns.seq[stray.at], case.lanes.token_of_call[call]


def _strays(case: Case, rank: int, context: int) -> Iterator[Stray]:
    """Positions at which known calls were followed by a call that had never followed them."""
    steps, start = _steps(case, rank)
    nexts: dict[tuple[Step, ...], dict[Step, int]] = defaultdict(dict)
    made = set(steps[:context])
    for at in range(context, len(steps)):
        key = tuple(steps[at - context : at])
        known = nexts[key]
        if known and steps[at] not in known:
            usual, where = next(reversed(known.items()))
            after = steps[where + 1] if where + 1 < at else None
            yield Stray(rank, start + at, usual, after, steps[at] in made)
        made.add(steps[at])
        known.pop(steps[at], None)
        known[steps[at]] = at


def _steps(case: Case, rank: int) -> tuple[list[Step], int]:
    columns = case.records.ranks[rank].columns
    if columns is None:
        return [], 0
    start = max(0, len(columns) - PAST)
    token_of = case.lanes.token_of_call
    tokens: Sequence[int] = [token_of[call] for call in columns.call[start:]]
    return list(zip(columns.group[start:], tokens, columns.site[start:], strict=True)), start


def _suspect(case: Case, stray: Stray) -> Suspect:
    columns = case.records.ranks[stray.rank].columns
    assert columns is not None
    at = stray.at
    steps, start = _steps(case, stray.rank)
    did, then = steps[at - start], steps[at - start + 1 : at - start + 2]
    kind = _kind(case, did, then, stray)
    group = stray.usual[0] if kind is Kind.SKIPPED_CALL else columns.group[at]
    seq = columns.seq[at]
    if kind is Kind.SKIPPED_CALL:
        before = (columns.seq[i] for i in range(at - 1, -1, -1) if columns.group[i] == group)
        seq = next(before, 0) + 1
    usual = next(iter(_call_of(case, stray.rank, stray.usual)), -1)
    is_end = kind is Kind.SKIPPED_CALL and case.lanes.tokens[stray.usual[1]].op in ("send", "recv")
    return Suspect(
        rank=stray.rank,
        kind=Kind.P2P_NO_PARTNER if is_end else kind,
        group=group,
        seq=seq,
        call=usual if kind is Kind.SKIPPED_CALL else columns.call[at],
        site=stray.usual[2] if kind is Kind.SKIPPED_CALL else columns.site[at],
        confidence=0.75,
        because=(
            f"after its last calls there always came {case.told(usual)} in "
            f"{case.name(stray.usual[0])}; this time it called {case.told(columns.call[at])} in "
            f"{case.name(columns.group[at])}, and no other rank of the circle did so",
        ),
        explains=1,
    )


def _kind(case: Case, did: Step, then: Sequence[Step], stray: Stray) -> Kind:
    if case.lanes.tokens[did[1]].op.endswith("barrier"):
        return Kind.UNEVEN_INPUTS
    if then and then[0] == stray.usual:
        swapped = stray.usual_after == did
        return Kind.ORDER_INVERSION if swapped else Kind.EXTRA_CALL
    if stray.usual_after == did:
        # Not seen whether the usual call came later: a host that need not wait would have made it.
        both = {stray.usual[0], did[0]}
        waits = case.records.ranks[stray.rank].library in RETIRED_MEANS_ENDED
        inverted = len(both) == 2 and not then and waits
        return Kind.ORDER_INVERSION if inverted else Kind.SKIPPED_CALL
    return Kind.WRONG_OP if did[0] == stray.usual[0] else Kind.SKIPPED_CALL


def _call_of(case: Case, rank: int, step: Step) -> Iterator[int]:
    columns = case.records.ranks[rank].columns
    assert columns is not None
    for i in range(len(columns) - 1, -1, -1):
        call = columns.call[i]
        if columns.group[i] == step[0] and case.lanes.token_of_call[call] == step[1]:
            yield call
