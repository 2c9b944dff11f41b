"""Decide from what all ranks recorded who caused the fault: the verdict and its reasons.

Mismatches come first, because whatever hangs after one follows from it; then the roots of the
graph of waiting; then what only shows in call sites or durations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flightrec.accuse import clash_suspects, mismatch_suspects, root_conflicts, site_suspects
from flightrec.lanes import lay_out
from flightrec.mismatch import Divergence, diverge
from flightrec.model import (
    Consequence,
    Culprit,
    Evidence,
    Finding,
    Records,
    Report,
    Verdict,
)
from flightrec.outcome import advice, lacking_evidence, summary_of, with_evidence
from flightrec.roots import root_suspects
from flightrec.stragglers import straggler_suspects
from flightrec.suspects import Case, Suspect
from flightrec.waits import Waits, who_waits


def diagnose(records: Records, evidence: Evidence) -> Report:
    """Return the verdict. The same records and evidence give the same report."""
    case = Case(records, lay_out(records))
    divergences = _divergences(case)
    roots = root_conflicts(case)
    waits = who_waits(records, case.lanes, _parted(divergences, roots))
    suspects, findings = _suspects(case, divergences, roots, waits, evidence)
    culprits = tuple(_culprit(case, s, evidence) for s in _ranked(suspects, waits))
    lacking = lacking_evidence(case, divergences, waits, findings) if not culprits else ()
    verdict = Verdict.FAULT if culprits else Verdict.UNDECIDED if lacking else Verdict.HEALTHY
    return Report(
        verdict=verdict,
        summary=summary_of(verdict, culprits, waits, lacking),
        culprits=culprits,
        consequences=_consequences(case, waits, {c.rank for c in culprits}),
        findings=tuple(_problems(records) + findings),
        lacking=lacking,
        next_steps=advice(culprits),
        world_size=len(records.expected_ranks),
        ranks_read=len(records.ranks),
        entries_read=sum(len(r.columns) for r in records.ranks.values() if r.columns is not None),
    )


def _divergences(case: Case) -> list[Divergence]:
    """Divergences of all groups; lanes of groups in the same role break ties."""
    of, groups = case.lanes.of, case.records.groups
    found: list[Divergence] = []
    for index, group in enumerate(groups):
        mine = diverge(index, of[index], case.lanes.tokens)
        if any(d.is_undecided for d in mine):
            same_role = [
                lane
                for other, known in enumerate(groups)
                if other != index and known.desc == group.desc
                for lane in of[other].values()
            ]
            mine = diverge(index, of[index], case.lanes.tokens, same_role)
        found += mine
    return found


def _parted(divergences: Iterable[Divergence], conflicts: Iterable[Suspect]) -> dict[int, int]:
    """For each group in which members disagree the first call at which they do."""
    places = [(d.group, d.seq) for d in divergences if not d.is_site_only]
    places += [(s.group, s.seq) for s in conflicts if s.seq is not None]
    return dict(sorted(places, reverse=True))


def _suspects(
    case: Case,
    divergences: Sequence[Divergence],
    conflicts: Sequence[Suspect],
    waits: Waits,
    evidence: Evidence,
) -> tuple[list[Suspect], list[Finding]]:
    hanging = {call.group: call.seq for calls in waits.opens.values() for call in calls}
    suspects = mismatch_suspects(case, divergences, hanging)
    suspects += [replace(s, is_hanging=s.group in hanging) for s in conflicts]
    suspects += clash_suspects(case, waits.channels, hanging)
    known = {suspect.rank for suspect in suspects}
    roots, findings = root_suspects(case, waits, divergences, evidence, known)
    suspects += roots
    if not suspects:
        suspects = site_suspects(case, divergences, hanging)
    if not suspects and not waits.blocked:
        suspects = straggler_suspects(case)
    return suspects, findings


def _ranked(suspects: Iterable[Suspect], waits: Waits) -> list[Suspect]:
    """One suspicion a rank, the surest; those that explain most and are surest first."""
    best: dict[int, Suspect] = {}
    for suspect in suspects:
        known = best.get(suspect.rank)
        if known is None or suspect.confidence > known.confidence:
            best[suspect.rank] = suspect
    reached = {rank: _reach(rank, waits) for rank in best}
    return sorted(best.values(), key=lambda s: (-s.confidence, -reached[s.rank], s.rank))


def _reach(rank: int, waits: Waits) -> int:
    """How many ranks wait for this one, directly or through others."""
    followers: dict[int, list[int]] = {}
    for edges in waits.edges.values():
        for edge in edges:
            followers.setdefault(edge.blocker, []).append(edge.waiter)
    seen, todo = {rank}, [rank]
    while todo:
        for waiter in followers.get(todo.pop(), ()):
            if waiter not in seen:
                seen.add(waiter)
                todo.append(waiter)
    return len(seen) - 1


def _culprit(case: Case, suspect: Suspect, evidence: Evidence) -> Culprit:
    group = case.records.groups[suspect.group]
    culprit = Culprit(
        rank=suspect.rank,
        kind=suspect.kind,
        group=str(group),
        group_ranks=group.ranks,
        seq=suspect.seq,
        op=case.op(suspect.call),
        where=case.where(suspect.site),
        confidence=round(suspect.confidence, 2),
        because=suspect.because,
        stack=case.site(suspect.site),
        is_hanging=suspect.is_hanging,
    )
    return with_evidence(culprit, evidence)


def _consequences(
    case: Case, waits: Waits, culprits: Mapping[int, object] | set[int]
) -> tuple[Consequence, ...]:
    """Every rank that only waits, at which call, and for whom."""
    return tuple(
        Consequence(
            rank=rank,
            waits_for=tuple(sorted({edge.blocker for edge in waits.edges.get(rank, ())})),
            group=str(case.records.groups[call.group]),
            seq=call.seq,
            op=case.op(call.call),
            where=case.where(call.site),
        )
        for rank, call in sorted(waits.blocked.items())
        if rank not in culprits
    )


def _problems(records: Records) -> list[Finding]:
    return [
        Finding(code="input", text=f"{p.source}: {p.what}" + (f". {p.remedy}" if p.remedy else ""))
        for p in records.problems
    ]
