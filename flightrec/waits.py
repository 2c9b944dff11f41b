"""Build the graph of who waits for whom.

An edge is strong when the records show that the other rank has not done its part (it never called,
or left no dump); weak when it did, but stands behind another call of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from flightrec.lanes import RETIRED_MEANS_ENDED, Lane, Lanes
from flightrec.model import Records
from flightrec.p2p import Channel, channels


class Why(Enum):
    NOT_CALLED = "has not made this call"
    NOT_POSTED = "has not called the other end"
    NOT_JOINED = "has not created this group"
    NO_DUMP = "left no dump"
    BEHIND = "stands at an earlier call of its own"


@dataclass(frozen=True, slots=True, order=True)
class Open:
    """A call that a rank made and that has not ended."""

    at: int  # position in the rank's records; -1: older than what they show
    group: int
    seq: int
    call: int = -1  # index into Records.calls; -1: not known
    site: int = -1
    is_p2p: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    waiter: int
    blocker: int
    why: Why
    call: Open

    @property
    def is_strong(self) -> bool:
        return self.why is not Why.BEHIND


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The graph: at which call each rank stands, and whom it waits for there."""

    opens: Mapping[int, tuple[Open, ...]]  # by rank, oldest first: the first open one of each group
    blocked: Mapping[int, Open]  # the call at which a rank stands
    edges: Mapping[int, tuple[Edge, ...]]  # by waiter
    channels: tuple[Channel, ...] = ()

    def strong(self) -> list[Edge]:
        return [edge for edges in self.edges.values() for edge in edges if edge.is_strong]


def who_waits(records: Records, lanes: Lanes, parted: Mapping[int, int]) -> Waits:
    """Find open calls and whom they wait for. Linear in ranks times members of their groups.

    `parted` tells for each group in which members disagree at which call they first did.
    """
    return _Graph(records, lanes, parted).build()


class _Graph:
    def __init__(self, records: Records, lanes: Lanes, parted: Mapping[int, int]) -> None:
        self.records, self.lanes, self.parted = records, lanes, parted
        self.channels = [
            channel
            for group, of_rank in lanes.of.items()
            if any(lane.p2p for lane in of_rank.values())
            for channel in channels(group, records.groups[group], of_rank)
        ]
        self.unpaired = {
            (rank, channel.group, call.at): channel.destination if call.is_send else channel.source
            for channel in self.channels
            for call in channel.unpaired
            for rank in (channel.source if call.is_send else channel.destination,)
        }
        self._blockers: dict[tuple[int, int], list[tuple[int, Why]]] = {}

    def build(self) -> Waits:
        opens = self._opens()
        blocked: dict[int, Open] = {}
        edges: dict[int, list[Edge]] = {}
        for rank, calls in opens.items():
            found = [(call, self._strong(rank, call)) for call in calls]
            standing = next(((call, e) for call, e in found if e), found[0] if found else None)
            if standing is not None:
                blocked[rank], edges[rank] = standing
        for edge in self._unjoined(opens):
            blocked.setdefault(edge.waiter, edge.call)
            edges.setdefault(edge.waiter, []).append(edge)
        for rank in [rank for rank, found in edges.items() if not found]:
            edges[rank] = self._weak(rank, blocked)
        return Waits(
            opens=opens,
            blocked=blocked,
            edges={rank: tuple(edges[rank]) for rank in sorted(edges)},
            channels=tuple(self.channels),
        )

    def _opens(self) -> dict[int, tuple[Open, ...]]:
        found: dict[int, list[Open]] = {rank: [] for rank in self.records.ranks}
        for group, of_rank in self.lanes.of.items():
            members = [r for r in self.records.groups[group].ranks if r in self.records.ranks]
            floor = min((of_rank[m].issued if m in of_rank else 0 for m in members), default=0)
            for rank, lane in of_rank.items():
                seq = self._open_seq(lane, group, floor)
                if seq is not None:
                    found[rank].append(_open_call(lane, group, seq))
                found[rank] += self._open_p2p(lane)
        return {rank: tuple(sorted(calls)) for rank, calls in found.items()}

    def _open_seq(self, lane: Lane, group: int, floor: int) -> int | None:
        """The lane's first open call. Where "retired" may also mean failed, a call that others
        have not made, or made differently, cannot have ended; one that all made will end."""
        record = self.records.ranks[lane.rank]
        if lane.frontier is not None or record.library not in RETIRED_MEANS_ENDED:
            return lane.open_seq
        doubtful = [seq for seq in (floor + 1, self.parted.get(group)) if seq is not None]
        if any(rank not in self.records.ranks for rank in self.records.groups[group].ranks):
            doubtful.append(lane.issued)
        return min((seq for seq in doubtful if 0 < seq <= lane.issued), default=None)

    def _open_p2p(self, lane: Lane) -> list[Open]:
        """The first open send or receive, and the first one without another end."""
        calls = [call for call in lane.p2p if call.is_open]
        lone = [call for call in calls if (lane.rank, lane.group, call.at) in self.unpaired]
        return [
            Open(call.at, lane.group, call.p2p_seq, call.call, call.site, True)
            for call in dict.fromkeys(calls[:1] + lone[:1])
        ]

    def _strong(self, rank: int, call: Open) -> list[Edge]:
        if call.is_p2p:
            return self._strong_p2p(rank, call)
        blockers = self._blockers_of(call.group, call.seq)
        return [Edge(rank, other, why, call) for other, why in blockers if other != rank]

    def _blockers_of(self, group: int, seq: int) -> list[tuple[int, Why]]:
        if (group, seq) not in self._blockers:
            found = []
            for rank in self.records.groups[group].ranks:
                lane = self.lanes.of[group].get(rank)
                if rank not in self.records.ranks:
                    found.append((rank, Why.NO_DUMP))
                elif (lane.issued if lane else 0) < seq:
                    found.append((rank, Why.NOT_CALLED))
            self._blockers[(group, seq)] = found
        return self._blockers[(group, seq)]

    def _strong_p2p(self, rank: int, call: Open) -> list[Edge]:
        peer = self._peer(call)
        if peer is not None and peer not in self.records.ranks:
            return [Edge(rank, peer, Why.NO_DUMP, call)]
        lone = self.unpaired.get((rank, call.group, call.at))
        return [] if lone is None else [Edge(rank, lone, Why.NOT_POSTED, call)]

    def _peer(self, call: Open) -> int | None:
        ranks, peer = self.records.groups[call.group].ranks, self.records.calls[call.call].peer
        return ranks[peer] if peer is not None and peer < len(ranks) else None

    def _weak(self, rank: int, blocked: Mapping[int, Open]) -> list[Edge]:
        """Members that made the call too, but stand at an earlier one of their own."""
        call = blocked[rank]
        peer = self._peer(call) if call.is_p2p else None
        others = self.records.groups[call.group].ranks if peer is None else (peer,)
        return [
            Edge(rank, other, Why.BEHIND, call)
            for other in others
            if other != rank and other in blocked and self._is_behind(other, blocked[other], call)
        ]

    def _is_behind(self, rank: int, stands: Open, call: Open) -> bool:
        return call.is_p2p or (stands.group, stands.seq, stands.is_p2p) != (
            call.group,
            call.seq,
            False,
        )

    def _unjoined(self, opens: Mapping[int, tuple[Open, ...]]) -> Iterator[Edge]:
        """Members that have not created a group which others created and cannot use yet."""
        for index, group in enumerate(self.records.groups):
            present = [rank for rank in group.ranks if rank in self.records.ranks]
            have = [rank for rank in present if index in self.records.ranks[rank].configured]
            lack = [r for r in present if r not in have and self.records.ranks[r].configured]
            used = any(lane.issued for lane in self.lanes.of[index].values())
            if group.is_declared and lack and have and not used:
                call = Open(1 << 62, index, 1)
                for rank in have:
                    if not opens[rank]:
                        yield from (Edge(rank, other, Why.NOT_JOINED, call) for other in lack)


def _open_call(lane: Lane, group: int, seq: int) -> Open:
    at = lane.position(seq)
    if at is None:
        return Open(-1, group, seq)
    return Open(lane.at[at], group, seq, lane.call[at], lane.site[at])
