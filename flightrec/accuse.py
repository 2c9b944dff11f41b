"""Turn divergences into suspects: who called something else, and where the others were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flightrec.lanes import Lane
from flightrec.mismatch import Divergence
from flightrec.model import Kind
from flightrec.p2p import Channel, size_clashes
from flightrec.suspects import Case, Suspect, shown
from flightrec.tokens import canonical, roots_itself


def mismatch_suspects(
    case: Case, divergences: Sequence[Divergence], hanging: Mapping[int, int]
) -> list[Suspect]:
    """Every rank that called something else than the others. `hanging`: group to open call."""
    return [
        _suspect(case, d, rank, d.group in hanging)
        for d in divergences
        if not d.is_site_only and not d.is_undecided
        for rank in d.ranks
    ]


def _suspect(case: Case, d: Divergence, rank: int, is_hanging: bool) -> Suspect:
    call, site = case.call_at(d.group, d.seq, of=rank)
    expected, expected_site = case.call_at(d.group, d.seq, of=_conformist(case, d))
    is_skip = d.kind is Kind.SKIPPED_CALL
    return Suspect(
        rank=rank,
        kind=d.kind,
        group=d.group,
        seq=d.seq,
        call=expected if is_skip else call,
        site=expected_site if is_skip else site,
        confidence=_confidence(d),
        because=tuple(_because(case, d, rank, call, expected, site, expected_site)),
        explains=1,
        is_hanging=is_hanging,
    )


def _conformist(case: Case, d: Divergence) -> int:
    """The lowest rank that called what was expected."""
    for rank, lane in sorted(case.lanes.of[d.group].items()):
        at = lane.position(d.seq)
        if at is not None and rank not in d.ranks and lane.token[at] == d.expected[0]:
            return rank
    return min(case.lanes.of[d.group])


def _confidence(d: Divergence) -> float:
    share = d.agreed / d.voters if d.voters else 0.0
    base = 0.95 if d.reason == "majority" and share >= 0.7 else 0.85 if share > 0.5 else 0.7
    return base if not d.shift.calls or d.shift.fits > 2 else base - 0.1


def _because(
    case: Case,
    d: Divergence,
    rank: int,
    call: int,
    expected: int,
    site: int,
    expected_site: int,
) -> Iterator[str]:
    others = f"{d.agreed} of {d.voters} ranks" if d.reason == "majority" else "the others"
    at = f" at {case.where(expected_site)}" if case.where(expected_site) else ""
    if d.kind is Kind.SKIPPED_CALL:
        left = f"{d.shift.calls} calls" if d.shift.calls > 1 else "one call"
        yield f"it left out {left}: {others} called {case.told(expected)}{at} here"
        yield f"moved by {d.shift.calls}, {d.shift.fits} of its next calls fit those of the others"
    elif d.kind is Kind.EXTRA_CALL:
        more = f"{-d.shift.calls} calls" if d.shift.calls < -1 else "one call"
        yield f"it made {more} too many: {others} called {case.told(expected)}{at} here"
        yield f"without that, {d.shift.fits} of its next calls fit those of the others"
    elif d.kind is Kind.UNEVEN_INPUTS:
        yield f"it called {case.told(call)} where {others} called {case.told(expected)}{at}"
        yield "one side left its loop while the other went round once more"
    else:
        yield f"it called {case.told(call)} where {others} called {case.told(expected)}{at}"
    if d.reason != "majority":
        yield f"there is no majority; {d.reason} speaks for the others"


def site_suspects(
    case: Case, divergences: Sequence[Divergence], hanging: Mapping[int, int]
) -> list[Suspect]:
    """A call of the right shape from a line that no other rank ever called from, once: a wrong
    root or reduce operation, which dumps do not record."""
    found = []
    used: Counter[int] = Counter()
    odd = [d for d in divergences if d.is_site_only and len(d.ranks) == 1 and d.agreed >= 2]
    if odd:
        for of_rank in case.lanes.of.values():
            for lane in of_rank.values():
                used.update(lane.site)
    for d in odd:
        (rank,) = d.ranks
        own = case.lane(d.group, rank)
        if own is None or used[d.got[1]] != 1 or not own.site.count(d.expected[1]):
            continue
        if d.kind is Kind.ROOT_MISMATCH and case.records.groups[d.group].ranks[0] == rank:
            continue  # the root of a broadcast often calls from a line of its own
        found.append(_site_suspect(case, d, rank, d.group in hanging))
    return found if len(found) == 1 else []


def _site_suspect(case: Case, d: Divergence, rank: int, is_hanging: bool) -> Suspect:
    call, site = case.call_at(d.group, d.seq, of=rank)
    _, usual = case.call_at(d.group, d.seq, of=_conformist(case, d))
    return Suspect(
        rank=rank,
        kind=d.kind,
        group=d.group,
        seq=d.seq,
        call=call,
        site=site,
        confidence=0.6 if is_hanging else 0.5,
        because=(
            f"its {case.told(call)} came from {case.where(site)}, a line from which no rank ever "
            f"called otherwise; {d.agreed} of {d.voters} ranks called from {case.where(usual)}",
            "dumps do not record root and reduce operation: compare the two lines",
        ),
        explains=1,
        is_hanging=is_hanging,
    )


def root_conflicts(case: Case) -> list[Suspect]:
    """Gathers and scatters for which two ranks took themselves for the root."""
    flagged = {i for i, call in enumerate(case.records.calls) if roots_itself(call)}
    found: list[Suspect] = []
    for group, of_rank in case.lanes.of.items() if flagged else ():
        roots = _roots_by_seq(of_rank, flagged)
        for seq in sorted(roots):
            if len(roots[seq]) > 1:
                found += _wrong_roots(case, group, seq, roots)
                break
    return found


def _roots_by_seq(of_rank: Mapping[int, Lane], flagged: set[int]) -> dict[int, list[int]]:
    roots: dict[int, list[int]] = {}
    for rank, lane in sorted(of_rank.items()):
        if flagged.isdisjoint(set(lane.call)):
            continue
        for at, call in enumerate(lane.call):
            if call in flagged:
                roots.setdefault(lane.seq[at], []).append(rank)
    return roots


def _wrong_roots(case: Case, group: int, seq: int, roots: Mapping[int, list[int]]) -> list[Suspect]:
    """The usual root of the group is right; the other one is not."""
    usual = Counter(r for s, ranks in roots.items() if s != seq for r in ranks)
    claims = sorted(roots[seq], key=lambda rank: (-usual[rank], rank))
    if usual[claims[0]] == usual[claims[1]]:
        return []
    found = []
    for rank in claims[1:]:
        call, site = case.call_at(group, seq, of=rank)
        because = (
            f"ranks {shown(sorted(claims))} both took themselves for the root; "
            f"rank {claims[0]} is the usual root of this group",
        )
        found.append(
            Suspect(
                rank=rank,
                kind=Kind.ROOT_MISMATCH,
                group=group,
                seq=seq,
                call=call,
                site=site,
                confidence=0.85,
                because=because,
                explains=1,
            )
        )
    return found


def clash_suspects(
    case: Case, pipes: Iterable[Channel], hanging: Mapping[int, int]
) -> list[Suspect]:
    """Sends and receives that disagree about size or type."""
    found = []
    for channel in pipes:
        for clash in size_clashes(channel, case.records.calls):
            name = canonical(case.op(clash.wrong.call))
            because = (
                f"its {name} was {case.told(clash.wrong.call)}; the other end was "
                f"{case.told(clash.expected)}, as in the calls before",
            )
            found.append(
                Suspect(
                    rank=clash.rank,
                    kind=clash.kind,
                    group=clash.group,
                    seq=clash.wrong.p2p_seq,
                    call=clash.wrong.call,
                    site=clash.wrong.site,
                    confidence=0.8,
                    because=because,
                    explains=1,
                    is_hanging=channel.group in hanging,
                )
            )
    return found
