"""Walk the graph of waiting to its roots: ranks that others wait for and that wait for nobody."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from flightrec.circles import inversions, strays
from flightrec.compare import pairs_of
from flightrec.mismatch import PAST, Divergence
from flightrec.model import Evidence, Finding, Kind
from flightrec.p2p import is_surplus, odd_batch
from flightrec.shifts import predict
from flightrec.stalls import held_up
from flightrec.suspects import Case, Suspect, shown
from flightrec.waits import Edge, Waits, Why

ALONE = 3  # so many idle members for one that waits: the one ran ahead, not all others stopped


def root_suspects(
    case: Case,
    waits: Waits,
    divergences: Sequence[Divergence],
    evidence: Evidence,
    known: Collection[int],
) -> tuple[list[Suspect], list[Finding]]:
    """Suspects from who waits for whom; `known` are ranks that a mismatch already explains."""
    edges = _believable(case, waits.strong(), divergences)
    waiting = {edge.waiter for edge in edges}
    by_blocker: dict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        by_blocker[edge.blocker].append(edge)
    roots = [rank for rank in sorted(by_blocker) if rank not in waiting]
    suspects: list[Suspect] = []
    findings: list[Finding] = []
    missing = [rank for rank in roots if rank not in case.records.ranks]
    for rank in roots:
        if rank in known or rank in missing:
            continue
        suspects += _present_root(case, waits, rank, by_blocker[rank], evidence)
    suspects = _or_those_ahead(case, suspects, by_blocker)
    dead, ambiguous = _dead(case, missing, by_blocker, evidence)
    suspects += dead
    findings += ambiguous
    for circle in _circles(edges, set(roots)):
        if not circle & set(known):
            found, seen = inversions(case, waits)
            suspects += found or strays(case, waits, circle)
            findings += seen
    if not roots and not suspects and not known:
        found, seen = _all_made_it(case, waits)
        suspects += found
        findings += seen
    return suspects, findings


def _believable(case: Case, edges: Iterable[Edge], divergences: Sequence[Divergence]) -> list[Edge]:
    """Leave out missing dumps that something else explains: a mismatch can kill a neighbour, and
    a call that a living rank has not made waits for that rank in any case."""
    edges = list(edges)
    parted = {
        rank
        for d in divergences
        if not d.is_site_only
        for rank in case.records.groups[d.group].ranks
    }
    explained = {e.waiter for e in edges if e.why is not Why.NO_DUMP}
    return [
        e
        for e in edges
        if e.why is not Why.NO_DUMP or (e.blocker not in parted and e.waiter not in explained)
    ]


def _present_root(
    case: Case, waits: Waits, rank: int, edges: Sequence[Edge], evidence: Evidence
) -> list[Suspect]:
    """A rank that recorded something, for which others wait and which waits for nobody."""
    edge = min(edges, key=lambda e: (e.call.at, e.waiter))
    if rank in waits.blocked:
        if waits.edges.get(rank):  # those for whom it waits wait for it: it went past their call
            return _went_past(case, waits, rank, edge)
        stands = waits.blocked[rank]
        found = [] if stands.is_p2p else held_up(case, stands.group, stands.seq)
        return [s for s in found if s.rank == rank]
    if edge.why is Why.NOT_POSTED:
        return [_no_partner(case, waits, rank, edge)]
    seq = case.issued(edge.call.group, rank) + 1
    call, site = case.call_at(edge.call.group, seq)
    kind, confidence = Kind.NEVER_ISSUED, 0.9
    if edge.why is Why.NOT_JOINED or _first_ever(case, edge.call.group, seq):
        kind, confidence = Kind.INIT_HANG, 0.8
    ended = next((e for e in evidence.exits if e.rank == rank and e.code == 0), None)
    if ended is not None and not ended.signal:
        kind = Kind.UNEVEN_INPUTS
    return [
        Suspect(
            rank=rank,
            kind=kind,
            group=edge.call.group,
            seq=seq,
            call=call,
            site=_last_site(case, rank, otherwise=site),
            confidence=confidence,
            because=_idle_because(case, rank, edge, seq, call, site),
            explains=len({e.waiter for e in edges}),
        )
    ]


def _went_past(case: Case, waits: Waits, rank: int, edge: Edge) -> list[Suspect]:
    """A rank that left out a call of which others wait, and stands at a later one."""
    if edge.why is Why.NOT_POSTED:
        return [_no_partner(case, waits, rank, edge)]
    seq = case.issued(edge.call.group, rank) + 1
    call, _ = case.call_at(edge.call.group, seq)
    stands = waits.blocked[rank]
    because = (
        f"it never made call {seq} of {case.name(edge.call.group)}, {case.told(call)}, but went on "
        f"to call {stands.seq} of {case.name(stands.group)}",
    )
    return [
        Suspect(
            rank=rank,
            kind=Kind.SKIPPED_CALL,
            group=edge.call.group,
            seq=seq,
            call=call,
            site=stands.site,
            confidence=0.75,
            because=because,
            explains=1,
        )
    ]


def _first_ever(case: Case, group: int, seq: int) -> bool:
    """The group's first call sets up its communicator (NCCL): nobody has completed one yet."""
    library = {case.records.ranks[r].library for r in case.lanes.of[group]}
    return seq == 1 and library <= {"nccl"} and bool(library)


def _last_site(case: Case, rank: int, *, otherwise: int = -1) -> int:
    """Where the rank made its last call, if its dump holds stacks."""
    last = case.last_of(rank)
    return last[3] if last and case.site(last[3]) else otherwise


def _idle_because(
    case: Case, rank: int, edge: Edge, seq: int, call: int, site: int
) -> tuple[str, ...]:
    name = case.name(edge.call.group)
    if edge.why is Why.NOT_JOINED:
        return (f"it has not created the group {name}, which the other members did",)
    lines = [f"it never made call {seq} of {name}, {case.told(call)}, for which others wait"]
    if case.where(site):
        lines.append(f"the others made it at {case.where(site)}")
    last = case.last_of(rank)
    if last:
        place = f" at {case.where(last[3])}" if case.where(last[3]) else ""
        lines.append(
            f"all its calls have ended; the last was {case.told(last[2])} "
            f"(seq {last[1]} of {case.name(last[0])}){place}: it is busy or stuck on the host"
        )
    return tuple(lines)


def _no_partner(case: Case, waits: Waits, rank: int, edge: Edge) -> Suspect:
    """The rank that never called the other end of an open send or receive."""
    channel = next(
        c
        for c in waits.channels
        if c.group == edge.call.group
        and {c.source, c.destination} == {rank, edge.waiter}
        and any(call.at == edge.call.at for call in c.unpaired)
    )
    blamed = edge.waiter if is_surplus(channel, list(waits.channels)) else rank
    lane = case.lane(edge.call.group, blamed)
    odd = odd_batch(lane, len(channel.sends)) if lane else None
    other = "receive" if channel.lacking > 0 else "send"
    because = [
        f"rank {channel.source} called {len(channel.sends)} sends to rank {channel.destination}, "
        f"which called {len(channel.receives)} receives: a {other} is missing"
    ]
    if blamed != rank:
        because.append("the other channels of the group have as many calls as the other end")
    return Suspect(
        rank=blamed,
        kind=Kind.P2P_NO_PARTNER if blamed == rank else Kind.EXTRA_CALL,
        group=edge.call.group,
        seq=odd.p2p_seq if odd else min(len(channel.sends), len(channel.receives)) + 1,
        call=odd.call if odd else edge.call.call,
        site=odd.site if odd else _last_site(case, blamed),
        confidence=0.85,
        because=tuple(because),
        explains=1,
    )


def _or_those_ahead(
    case: Case, suspects: list[Suspect], by_blocker: Mapping[int, Sequence[Edge]]
) -> list[Suspect]:
    """When nearly all members of a group stand still together and one waits for them, that one
    made a call too many."""
    idle: dict[tuple[int, int | None], list[Suspect]] = defaultdict(list)
    for suspect in suspects:
        if suspect.kind is Kind.NEVER_ISSUED:
            idle[(suspect.group, suspect.seq)].append(suspect)
    for (group, seq), together in idle.items():
        ahead = {e.waiter for s in together for e in by_blocker[s.rank]}
        if len(together) >= ALONE * len(ahead):
            suspects = [s for s in suspects if s not in together]
            suspects += [_ahead(case, rank, group, seq or 1, together) for rank in sorted(ahead)]
    return suspects


def _ahead(case: Case, rank: int, group: int, seq: int, together: Sequence[Suspect]) -> Suspect:
    call, site = case.call_at(group, seq, of=rank)
    lane = case.lane(group, rank)
    at = lane.position(seq) if lane else None
    past = pairs_of(lane, max(0, at - PAST), at) if lane and at else []
    goes_on = bool(lane and at is not None and predict(past, 1)[:1] == pairs_of(lane, at, at + 1))
    idle = tuple(s.rank for s in together)
    return Suspect(
        rank=rank,
        kind=Kind.UNEVEN_INPUTS if goes_on else Kind.EXTRA_CALL,
        group=group,
        seq=seq,
        call=call,
        site=site,
        confidence=0.55,
        because=(
            f"it alone made call {seq} of {case.name(group)}, {case.told(call)}; "
            f"ranks {shown(idle)} all stand at call {seq - 1} and wait for nobody",
        ),
        explains=1,
    )


def _dead(
    case: Case,
    missing: Sequence[int],
    by_blocker: Mapping[int, Sequence[Edge]],
    evidence: Evidence,
) -> tuple[list[Suspect], list[Finding]]:
    """Ranks without a dump for which others wait. Of several in one group only those are named
    for which there is more than their absence."""
    exits = {e.rank: e for e in evidence.exits}
    lost = {s.rank for s in evidence.ras if s.is_missing or s.is_dead}
    victims = {r for r, e in exits.items() if e.error and not e.is_first_cause}
    firsts = [rank for rank in missing if rank in exits and exits[rank].is_first_cause]
    candidates = firsts or [rank for rank in missing if rank not in victims] or list(missing)
    named = [r for r in candidates if r in firsts or _is_alone(r, candidates, by_blocker)]
    named = named or (candidates if _is_one_host(candidates, case) else [])
    suspects = []
    for rank in named:
        edge = min(by_blocker[rank], key=lambda e: (e.call.at, e.waiter))
        because = ["it left no dump, and others wait for it"]
        if rank in exits:
            because.append(f"its process ended: {_told_exit(exits[rank])}")
        if rank in lost:
            because.append("NCCL's RAS service cannot reach it")
        suspects.append(
            Suspect(
                rank=rank,
                kind=Kind.DIED,
                group=edge.call.group,
                seq=edge.call.seq,
                call=edge.call.call,
                site=edge.call.site,
                confidence=min(0.98, (0.85 if len(named) < 3 else 0.7) + 0.08 * (len(because) - 1)),
                because=tuple(because),
                explains=len({e.waiter for e in by_blocker[rank]}),
            )
        )
    unnamed = [rank for rank in candidates if rank not in named]
    if not unnamed or named:
        return suspects, []
    text = (
        f"ranks {shown(unnamed)} left no dump and others wait for them; at least one of them died"
    )
    return suspects, [Finding(code="several_missing", text=text, ranks=tuple(unnamed))]


def _told_exit(exit_: object) -> str:
    code, signal = getattr(exit_, "code", None), getattr(exit_, "signal", "")
    error = getattr(exit_, "error", "")
    how = signal or (f"exit code {code}" if code is not None else "no code is known")
    return f"{how}, {error}" if error else how


def _is_alone(
    rank: int, candidates: Sequence[int], by_blocker: Mapping[int, Sequence[Edge]]
) -> bool:
    """Somebody waits for this one and for none of the other missing ranks."""
    others: set[int] = set()
    for other in candidates:
        if other != rank:
            others |= {e.waiter for e in by_blocker[other]}
    return any(e.waiter not in others for e in by_blocker[rank])


def _is_one_host(ranks: Sequence[int], case: Case) -> bool:
    """Four or more missing ranks that fill one aligned block were one machine."""
    size = len(ranks)
    block = tuple(range(ranks[0], ranks[0] + size)) if ranks else ()
    fills = size >= 4 and size & (size - 1) == 0 and ranks[0] % size == 0
    return fills and tuple(ranks) == block and len(case.records.ranks) >= size


def _circles(edges: Sequence[Edge], roots: set[int]) -> list[set[int]]:
    """Sets of ranks that wait for each other and from which no way leads to a root."""
    followers: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        followers[edge.blocker].add(edge.waiter)
    reached, todo = set(roots), list(roots)
    while todo:
        for waiter in followers[todo.pop()]:
            if waiter not in reached:
                reached.add(waiter)
                todo.append(waiter)
    rest = {edge.waiter for edge in edges} - reached
    return [rest] if rest else []


def _all_made_it(case: Case, waits: Waits) -> tuple[list[Suspect], list[Finding]]:
    """Nobody is behind: a circle of device order, or one call that a device holds up."""
    suspects, findings = inversions(case, waits)
    if suspects:
        return suspects, findings
    sinks = {
        (call.group, call.seq)
        for rank, call in waits.blocked.items()
        if not waits.edges.get(rank) and not call.is_p2p
    }
    for group, seq in sorted(sinks):
        suspects += held_up(case, group, seq)
    return suspects, []
