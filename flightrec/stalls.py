"""Decide who holds up a call that every member made: the device of one of them, or the network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flightrec.lanes import P2P, Lane
from flightrec.model import Kind
from flightrec.suspects import Case, Suspect, shown
from flightrec.tokens import canonical
from flightrec.waits import Key

TIMING = "TORCH_NCCL_ENABLE_TIMING=1 at the next run: dumps then tell which device started the call"


def held_up(case: Case, group: int, seq: int) -> list[Suspect]:
    """The ranks whose device never took part in a call that all members made, or nobody."""
    lanes = case.lanes.of[group]
    done = sorted(rank for rank, lane in lanes.items() if _has_ended(lane, seq))
    waiting = sorted(set(lanes) - set(done))
    if done and len(waiting) <= len(done):
        if _is_rooted(case, group, seq):
            return []  # whoever passes another root leaves an innocent one waiting
        because = f"all members called; ranks {shown(done)} completed the call, its device did not"
        return [
            _suspect(case, rank, Kind.DEVICE_STALL, group, seq, (because,), 0.8) for rank in waiting
        ]
    started = [rank for rank in waiting if _has_started(lanes[rank], seq)]
    idle = [rank for rank in waiting if rank not in started]
    if started and idle:
        because = f"all members called; the devices of ranks {shown(started)} started, its did not"
        return [
            _suspect(case, rank, Kind.DEVICE_STALL, group, seq, (because,), 0.85) for rank in idle
        ]
    return []


def held_up_pair(case: Case, owner: int, key: Key) -> list[Suspect]:
    """The rank whose device never started its end of a send or receive while the peer's did."""
    mine = _call_at(case, key.group, owner, key.seq)
    if mine is None or not mine.is_started:
        return []
    peer = case.records.groups[key.group].ranks[mine.peer]
    lane = case.lane(key.group, peer)
    theirs = next((c for c in lane.p2p if c.is_open), None) if lane else None
    if theirs is None or theirs.is_started:
        return []
    because = f"rank {owner} started its end on its device, this rank's device did not"
    suspect = _suspect(case, peer, Kind.DEVICE_STALL, key.group, theirs.p2p_seq, (because,), 0.8)
    return [replace(suspect, call=theirs.call, site=theirs.site)]


def _call_at(case: Case, group: int, rank: int, at: int) -> P2P | None:
    lane = case.lane(group, rank)
    return next((c for c in lane.p2p if c.at == at), None) if lane else None


def _suspect(
    case: Case,
    rank: int,
    kind: Kind,
    group: int,
    seq: int,
    because: tuple[str, ...],
    confidence: float,
) -> Suspect:
    call, site = case.call_at(group, seq, of=rank)
    return Suspect(
        rank=rank,
        kind=kind,
        group=group,
        seq=seq,
        call=call,
        site=site,
        confidence=confidence,
        because=because,
    )


def _has_ended(lane: Lane, seq: int) -> bool:
    if lane.frontier is not None:
        return lane.frontier.last_completed >= seq
    at = lane.position(seq)
    return at is not None and at < lane.first_open


def _has_started(lane: Lane, seq: int) -> bool:
    if lane.frontier is not None:
        return lane.frontier.last_started >= seq
    return lane.position(seq) in lane.started


def _is_rooted(case: Case, group: int, seq: int) -> bool:
    call, _ = case.call_at(group, seq)
    return canonical(case.op(call)) in ("broadcast", "reduce", "gather", "scatter")


def gave_up_early(case: Case, group: int, seq: int, waiting: Iterable[int]) -> list[Suspect]:
    """The one waiting rank whose time limit for the call is below half of all others' limit."""
    limits: dict[int, int] = {}
    for rank in sorted(case.lanes.of[group]):
        call, _ = case.call_at(group, seq, of=rank)
        limit = case.records.calls[call].timeout_ms if call >= 0 else None
        if limit is not None:
            limits[rank] = limit
    values = sorted(set(limits.values()))
    short = [rank for rank, limit in limits.items() if limit == values[0]]
    if len(limits) < 3 or len(values) != 2 or len(short) != 1 or 2 * values[0] > values[1]:
        return []
    if short[0] not in set(waiting):
        return []
    because = (
        f"its time limit for the call is {values[0]} ms, that of all others {values[1]} ms: "
        "it gives up while they still wait"
    )
    return [_suspect(case, short[0], Kind.ONE_SIDED_TIMEOUT, group, seq, (because,), 0.7)]
