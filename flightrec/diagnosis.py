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
    Kind,
    Records,
    Report,
    Verdict,
)
from flightrec.outcome import advice, lacking_evidence, summary_of, with_evidence
from flightrec.roots import root_suspects
from flightrec.stalls import gave_up_early
from flightrec.stragglers import straggler_suspects
from flightrec.suspects import Case, Suspect, shown
from flightrec.waits import Key, Waits, who_waits

SURE = 0.7  # confidence from which a living rank explains a hang better than an absent one
WAITS_FOR_MAX = 16  # ranks that one consequence names


def diagnose(records: Records, evidence: Evidence) -> Report:
    """Return the verdict. The same records and evidence give the same report."""
    case = Case(records, lay_out(records))
    divergences = _divergences(case)
    roots = root_conflicts(case)
    parted = _parted(divergences, roots)
    waits = who_waits(records, case.lanes, parted)
    suspects = _mismatches(case, divergences, roots, waits)
    more, findings = root_suspects(case, waits, parted, evidence)
    more = _unless_living_explain(case, parted, more, evidence)
    suspects += _unless_limits_differ(case, waits, more)
    suspects, excused = _unless_others_explain(suspects, evidence)
    findings += excused
    suspects = _unless_sites_tell(case, divergences, waits, suspects)
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


def _mismatches(
    case: Case, divergences: Sequence[Divergence], conflicts: Sequence[Suspect], waits: Waits
) -> list[Suspect]:
    hanging = _hanging(waits)
    suspects = mismatch_suspects(case, divergences, hanging)
    suspects += [replace(s, is_hanging=s.group in hanging) for s in conflicts]
    return suspects + clash_suspects(case, waits.channels, hanging)


def _unless_limits_differ(case: Case, waits: Waits, suspects: list[Suspect]) -> list[Suspect]:
    """A rank that gives up long before the others is the fault, whomever they all wait for."""
    keys = {key for key in map(waits.key, waits.blocked) if key.owner < 0}
    early = [
        suspect
        for key in sorted(keys)
        for suspect in gave_up_early(case, key.group, key.seq, waits.standing(key))
    ]
    groups = {suspect.group for suspect in early}
    return early + [suspect for suspect in suspects if suspect.group not in groups]


def _unless_living_explain(
    case: Case, parted: Mapping[int, int], suspects: list[Suspect], evidence: Evidence
) -> list[Suspect]:
    """Dumps get lost: suppose that absent ranks did their part, and see whether the hang is still
    there. If a living rank explains it then, it is added to the suspects."""
    absent = _merely_absent(suspects, evidence)
    if not absent or len(absent) < len(suspects):
        return suspects
    excused = {s.rank for s in absent}
    waits = who_waits(case.records, case.lanes, parted, excused=excused)
    living, _ = root_suspects(case, waits, parted, evidence)
    # With a member gone a call may look completed on some: that tells nothing of devices.
    sure = {Kind.DIED: 2.0, Kind.DEVICE_STALL: 0.85}
    if not living:
        waits = _without_dead_ends(case, waits, excused)
        living, _ = root_suspects(case, waits, parted, evidence)
        sure[Kind.DEVICE_STALL] = 2.0
    return suspects + [s for s in living if s.confidence >= sure.get(s.kind, SURE)]


def _without_dead_ends(case: Case, waits: Waits, excused: set[int]) -> Waits:
    """Whoever waits for nothing but excused ranks, or for those who do, waits for what they wait
    for: of that nothing is known, so these ranks are left out."""
    blocked, lacks = dict(waits.blocked), dict(waits.lacks)
    while ends := {
        rank
        for rank, call in blocked.items()
        if not lacks[waits.key(rank)]
        and excused.intersection(case.records.groups[call.group].ranks)
    }:
        blocked = {rank: call for rank, call in blocked.items() if rank not in ends}
        lacks = {
            key: tuple(lack for lack in found if lack.rank not in ends)
            for key, found in lacks.items()
        }
    return replace(waits, blocked=blocked, lacks=lacks)


def _merely_absent(suspects: Sequence[Suspect], evidence: Evidence) -> list[Suspect]:
    """Those said to have died for nothing more than their missing dump."""
    known = {e.rank for e in evidence.exits} | {s.rank for s in evidence.ras if s.is_dead}
    return [s for s in suspects if s.kind is Kind.DIED and s.rank not in known]


def _unless_others_explain(
    suspects: list[Suspect], evidence: Evidence
) -> tuple[list[Suspect], list[Finding]]:
    """Dumps get lost: beside another fault, absence alone accuses nobody."""
    absent = _merely_absent(suspects, evidence)
    others = [s for s in suspects if s not in absent]
    if not absent or not others:
        return suspects, []
    ranks = tuple(sorted(s.rank for s in absent))
    text = f"ranks {shown(ranks)} left no dump, and others wait for them too"
    return others, [Finding(code="also_missing", text=text, ranks=ranks)]


def _unless_sites_tell(
    case: Case, divergences: Sequence[Divergence], waits: Waits, suspects: list[Suspect]
) -> list[Suspect]:
    """What only shows in call sites or durations is believed when nothing stronger speaks. A call
    that some completed and some did not may also come from a wrong root."""
    if any(suspect.kind is not Kind.DEVICE_STALL for suspect in suspects):
        return suspects
    by_site = site_suspects(case, divergences, _hanging(waits))
    if by_site or suspects or waits.blocked:
        return by_site or suspects
    return straggler_suspects(case)


def _hanging(waits: Waits) -> dict[int, int]:
    return {call.group: call.seq for calls in waits.opens.values() for call in calls}


def _ranked(suspects: Iterable[Suspect], waits: Waits) -> list[Suspect]:
    """One suspicion a rank, the surest; those that explain most and are surest first."""
    best: dict[int, Suspect] = {}
    for suspect in suspects:
        known = best.get(suspect.rank)
        if known is None or _comes_before(suspect, known):
            best[suspect.rank] = suspect
    reached = {rank: _reach(rank, waits) for rank in best}
    return sorted(best.values(), key=lambda s: (-s.confidence, -reached[s.rank], s.rank))


def _comes_before(one: Suspect, other: Suspect) -> bool:
    """In one group the earlier call is the cause, between groups the surer suspicion."""
    if one.group == other.group and one.seq != other.seq and None not in (one.seq, other.seq):
        return (one.seq or 0) < (other.seq or 0)
    return one.confidence > other.confidence


def _reach(rank: int, waits: Waits) -> int:
    """How many ranks wait for this one, directly or through others."""
    standing: dict[Key, list[int]] = {}
    for waiter in waits.blocked:
        standing.setdefault(waits.key(waiter), []).append(waiter)
    held: dict[int, list[Key]] = {}
    for key, lacks in waits.lacks.items():
        for lack in lacks:
            held.setdefault(lack.rank, []).append(key)
    seen, todo = {rank}, [rank]
    while todo:
        for key in held.get(todo.pop(), ()):
            new = [waiter for waiter in standing[key] if waiter not in seen]
            seen.update(new)
            todo += new
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
            waits_for=tuple(lack.rank for lack in waits.lacking(rank)[:WAITS_FOR_MAX]),
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
