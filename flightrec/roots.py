"""Walk the graph of waiting to its ends: ranks that others wait for and that wait for nobody."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flightrec.circles import inversions
from flightrec.compare import pairs_of
from flightrec.mismatch import PAST
from flightrec.model import Evidence, Finding, Kind
from flightrec.p2p import is_surplus, odd_batch
from flightrec.shifts import predict
from flightrec.sinks import Sink, sinks
from flightrec.stalls import held_up, held_up_pair
from flightrec.strays import stray_suspects
from flightrec.suspects import Case, Suspect, shown
from flightrec.waits import Open, Waits, Why

ALONE = 3  # so many idle members for one that waits: the one ran ahead, not all others stopped


@dataclass(frozen=True, slots=True)
class Demand:
    """One rank waits for another at a call."""

    waiter: int
    call: Open
    why: Why


def root_suspects(
    case: Case, waits: Waits, parted: Mapping[int, int], evidence: Evidence
) -> tuple[list[Suspect], list[Finding]]:
    """Suspects from who waits for whom; `parted` are groups whose members disagree, and where:
    what ends there is explained already."""
    ends = [sink for sink in sinks(waits) if not _is_explained(sink, parted)]
    idle = {s.ranks[0]: _demands(waits, s.ranks[0]) for s in ends if s.ranks and not s.keys}
    missing = [rank for rank in idle if rank not in case.records.ranks]
    suspects = [
        _idle_root(case, waits, rank, demands, evidence)
        for rank, demands in idle.items()
        if rank not in missing
    ]
    suspects = _or_those_ahead(case, suspects, idle)
    dead, findings = _dead(case, missing, idle, evidence)
    suspects += dead
    for sink in ends:
        if sink.keys and not sink.ranks:
            key = sink.keys[0]
            paired = key.owner >= 0
            suspects += (
                held_up_pair(case, key.owner, key) if paired else held_up(case, key.group, key.seq)
            )
        elif sink.keys and sink.ranks:
            found, seen = _circle(case, waits, sink)
            suspects += found
            findings += seen
    return suspects, findings


def _is_explained(sink: Sink, parted: Mapping[int, int]) -> bool:
    return any(k.owner < 0 and k.seq >= parted.get(k.group, k.seq + 1) for k in sink.keys)


def _demands(waits: Waits, rank: int) -> list[Demand]:
    """The calls for which others wait for this rank, earliest first."""
    found = [
        Demand(waiter, call, lack.why)
        for waiter, call in waits.blocked.items()
        for lack in waits.lacking(waiter)
        if lack.rank == rank
    ]
    return sorted(found, key=lambda d: (d.call.at, d.waiter))


def _circle(case: Case, waits: Waits, sink: Sink) -> tuple[list[Suspect], list[Finding]]:
    """Ranks that wait for each other: who of them left the common order."""
    within = Waits(
        opens={rank: waits.opens[rank] for rank in sink.ranks},
        blocked={rank: waits.blocked[rank] for rank in sink.ranks},
        lacks=waits.lacks,
        channels=waits.channels,
    )
    found, seen = inversions(case, within)
    if found:
        return found, seen
    went_past = _went_past(within, sink)
    strays: list[Suspect] = []
    if any(call.is_p2p for call in within.blocked.values()):
        # Sends and receives pair by count, so who left one out shows in its own way only.
        known = stray_suspects(case, sink.ranks, only_known=True)
        strays = _with_partner(case, within, known, went_past)
    if not strays and len(went_past) == 1:
        return [_left_out(case, within, *went_past[0])], []
    if not strays:
        strays = _with_partner(case, within, stray_suspects(case, sink.ranks), went_past)
    return strays, []


def _went_past(waits: Waits, sink: Sink) -> list[tuple[int, Demand]]:
    """Ranks that left out a call of others and stand at one that all others made too."""
    found = []
    for rank in sink.ranks:
        demands = [d for d in _demands(waits, rank) if d.why is not Why.ELSEWHERE]
        if demands and not any(lack.is_strong for lack in waits.lacking(rank)):
            found.append((rank, demands[0]))
    return found


def _with_partner(
    case: Case, waits: Waits, strays: list[Suspect], went_past: list[tuple[int, Demand]]
) -> list[Suspect]:
    """A stray that left out an end of a send or receive is told as such."""
    demands = dict(went_past)
    return [
        _left_out(case, waits, s.rank, demands[s.rank])
        if s.rank in demands and demands[s.rank].why is Why.NOT_POSTED
        else s
        for s in strays
    ]


def _left_out(case: Case, waits: Waits, rank: int, demand: Demand) -> Suspect:
    """A rank that left out a call of which others wait, and stands at a later one."""
    if demand.why is Why.NOT_POSTED:
        return _no_partner(case, waits, rank, demand)
    seq = case.issued(demand.call.group, rank) + 1
    call, _ = case.call_at(demand.call.group, seq)
    stands = waits.blocked[rank]
    because = (
        f"it never made call {seq} of {case.name(demand.call.group)}, {case.told(call)}, but went "
        f"on to call {stands.seq} of {case.name(stands.group)}",
    )
    return Suspect(
        rank=rank,
        kind=Kind.SKIPPED_CALL,
        group=demand.call.group,
        seq=seq,
        call=call,
        site=stands.site,
        confidence=0.7,
        because=because,
        explains=1,
    )


def _idle_root(
    case: Case, waits: Waits, rank: int, demands: Sequence[Demand], evidence: Evidence
) -> Suspect:
    """A rank that recorded something, for which others wait and which waits for nobody."""
    demand = demands[0]
    if demand.why is Why.NOT_POSTED:
        return _no_partner(case, waits, rank, demand)
    group = demand.call.group
    seq = max(case.issued(group, rank) + 1, min(case.first_shown(group), demand.call.seq))
    call, site = case.call_at(group, seq)
    kind, confidence = Kind.NEVER_ISSUED, 0.9
    if demand.why is Why.NOT_JOINED or _first_ever(case, group, seq):
        kind, confidence = Kind.INIT_HANG, 0.8
    ended = next((e for e in evidence.exits if e.rank == rank and e.code == 0), None)
    if ended is not None and not ended.signal:
        kind = Kind.UNEVEN_INPUTS
    return Suspect(
        rank=rank,
        kind=kind,
        group=group,
        seq=seq,
        call=call,
        site=_last_site(case, rank, otherwise=site),
        confidence=confidence,
        because=_idle_because(case, rank, demand, seq, call, site),
        explains=len(demands),
    )


def _first_ever(case: Case, group: int, seq: int) -> bool:
    """The group's first call sets up its communicator (NCCL): nobody has completed one yet."""
    library = {case.records.ranks[r].library for r in case.lanes.of[group]}
    return seq == 1 and library <= {"nccl"} and bool(library)


def _last_site(case: Case, rank: int, *, otherwise: int = -1) -> int:
    """Where the rank made its last call, if its dump holds stacks."""
    last = case.last_of(rank)
    return last[3] if last and case.site(last[3]) else otherwise


def _idle_because(
    case: Case, rank: int, demand: Demand, seq: int, call: int, site: int
) -> tuple[str, ...]:
    name = case.name(demand.call.group)
    if demand.why is Why.NOT_JOINED:
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


def _no_partner(case: Case, waits: Waits, rank: int, demand: Demand) -> Suspect:
    """The rank that never called the other end of an open send or receive."""
    channel = next(
        c
        for c in waits.channels
        if c.group == demand.call.group
        and {c.source, c.destination} == {rank, demand.waiter}
        and any(call.at == demand.call.at for call in c.unpaired)
    )
    blamed = demand.waiter if is_surplus(channel, list(waits.channels)) else rank
    lane = case.lane(demand.call.group, blamed)
    odd = odd_batch(lane, len(channel.sends)) if lane else None
    other = "receive" if channel.lacking > 0 else "send"
    because = [
        f"rank {channel.source} called {len(channel.sends)} sends to rank {channel.destination}, "
        f"which called {len(channel.receives)} receives: a {other} is missing"
    ]
    kind = Kind.P2P_NO_PARTNER if blamed == rank else Kind.EXTRA_CALL
    own = channel.sends if channel.lacking < 0 else channel.receives
    call = own[-1].call if blamed == rank and own else demand.call.call
    if blamed != rank:
        because.append("the other channels of the group have as many calls as the other end")
    elif odd is None and rank not in waits.blocked:
        kind = Kind.NEVER_ISSUED  # it did not go past the call: it has not come to it
        because.append("all its calls have ended: it is busy or stuck on the host")
    return Suspect(
        rank=blamed,
        kind=kind,
        group=demand.call.group,
        seq=odd.p2p_seq if odd else min(len(channel.sends), len(channel.receives)) + 1,
        call=odd.call if odd else call,
        site=odd.site if odd else _last_site(case, blamed),
        confidence=0.85,
        because=tuple(because),
        explains=1,
    )


def _or_those_ahead(
    case: Case, suspects: list[Suspect], by_blocker: Mapping[int, Sequence[Demand]]
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
    by_blocker: Mapping[int, Sequence[Demand]],
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
        demand = by_blocker[rank][0]
        because = ["it left no dump, and others wait for it"]
        if rank in exits:
            because.append(f"its process ended: {_told_exit(exits[rank])}")
        if rank in lost:
            because.append("NCCL's RAS service cannot reach it")
        base = 0.85 if len(named) < 3 else 0.7
        if _has_ended(case, demand) and len(because) == 1:
            base = 0.6
            because[0] = "it left no dump; the others' calls ended, or failed: gloo does not tell"
        suspects.append(
            Suspect(
                rank=rank,
                kind=Kind.DIED,
                group=demand.call.group,
                seq=demand.call.seq,
                call=demand.call.call,
                site=demand.call.site,
                confidence=min(0.98, base + 0.08 * (len(because) - 1)),
                because=tuple(because),
                explains=len(by_blocker[rank]),
            )
        )
    unnamed = [rank for rank in candidates if rank not in named]
    if not unnamed or named:
        return suspects, []
    text = (
        f"ranks {shown(unnamed)} left no dump and others wait for them; at least one of them died"
    )
    return suspects, [Finding(code="several_missing", text=text, ranks=tuple(unnamed))]


def _has_ended(case: Case, demand: Demand) -> bool:
    """Where "retired" may mean failed, a call that ended tells little of a member that is gone."""
    lane = case.lane(demand.call.group, demand.waiter)
    at = lane.position(demand.call.seq) if lane else None
    return bool(lane and at is not None and at < lane.first_open)


def _told_exit(exit_: object) -> str:
    code, signal = getattr(exit_, "code", None), getattr(exit_, "signal", "")
    error = getattr(exit_, "error", "")
    how = signal or (f"exit code {code}" if code is not None else "no code is known")
    return f"{how}, {error}" if error else how


def _is_alone(
    rank: int, candidates: Sequence[int], by_blocker: Mapping[int, Sequence[Demand]]
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
