"""Build the graph of who waits for whom.

A rank stands at a call, and a call lacks ranks: those that have not done their part (they never
called, or left no dump), or, where all did, those that stand at another call of their own. Ranks at
one call share its list, so the graph stays small when a thousand ranks wait for one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
    ELSEWHERE = "made this call too, but stands at another one"


@dataclass(frozen=True, slots=True, order=True)
class Open:
    """A call that a rank made and that has not ended."""

    at: int  # position in the rank's records; -1: older than what they show
    group: int
    seq: int
    call: int = -1  # index into Records.calls; -1: not known
    site: int = -1
    is_p2p: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One call as all its members see it; a send or receive belongs to one rank."""

    group: int
    seq: int
    owner: int = -1  # the rank of a send or receive


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a call does not go on: this rank."""

    rank: int
    why: Why

    @property
    def is_strong(self) -> bool:
        return self.why is not Why.ELSEWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Where each rank stands, and what each call lacks."""

    opens: Mapping[int, tuple[Open, ...]]  # by rank, oldest first: the first open one of each group
    blocked: Mapping[int, Open]  # the call at which a rank stands
    lacks: Mapping[Key, tuple[Lack, ...]]
    channels: tuple[Channel, ...] = ()

    def key(self, rank: int) -> Key:
        return key_of(rank, self.blocked[rank])

    def lacking(self, rank: int) -> tuple[Lack, ...]:
        """For whom the rank waits; empty also when it does not wait."""
        return self.lacks[self.key(rank)] if rank in self.blocked else ()

    def standing(self, key: Key) -> list[int]:
        return [rank for rank in self.blocked if self.key(rank) == key]


def key_of(rank: int, call: Open) -> Key:
    return Key(call.group, call.at if call.is_p2p else call.seq, rank if call.is_p2p else -1)


def who_waits(
    records: Records,
    lanes: Lanes,
    parted: Mapping[int, int],
    *,
    excused: Collection[int] = (),
) -> Waits:
    """Find open calls and whom they wait for. Linear in ranks times members of their groups.

    `parted` tells for each group in which members disagree at which call they first did. `excused`
    are ranks without a dump that are taken to have done their part.
    """
    return _Graph(records, lanes, parted, excused).build()


class _Graph:
    def __init__(
        self,
        records: Records,
        lanes: Lanes,
        parted: Mapping[int, int],
        excused: Collection[int],
    ) -> None:
        self.records, self.lanes, self.parted = records, lanes, parted
        self.excused = set(excused)
        self.channels = [
            channel
            for group, of_rank in lanes.of.items()
            if any(lane.p2p for lane in of_rank.values())
            for channel in channels(group, records.groups[group], of_rank)
        ]
        self.unpaired = {
            (channel.source if call.is_send else channel.destination, channel.group, call.at): (
                channel.destination if call.is_send else channel.source
            )
            for channel in self.channels
            for call in channel.unpaired
        }
        # A mismatch can kill a neighbour: its missing dump is a consequence.
        self.victims = {r for group in parted for r in records.groups[group].ranks}
        self._strong: dict[Key, tuple[Lack, ...]] = {}

    def build(self) -> Waits:
        opens = self._opens()
        blocked: dict[int, Open] = {}
        for rank, calls in opens.items():
            if calls:
                # Devices work in order, so the oldest call counts; of those whose place is not
                # known (log lines) the one that lacks somebody.
                oldest = [call for call in calls if call.at == calls[0].at]
                lacking = (call for call in oldest if self._strong_of(rank, call))
                blocked[rank] = next(lacking, calls[0])
        for rank, call, lack in self._unjoined(opens):
            blocked.setdefault(rank, call)
            self._strong[key_of(rank, call)] = lack
        lacks = {}
        for rank, call in blocked.items():
            key = key_of(rank, call)
            if key not in lacks:
                lacks[key] = self._strong_of(rank, call) or self._elsewhere(key, call, blocked)
        return Waits(opens=opens, blocked=blocked, lacks=lacks, channels=tuple(self.channels))

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
        known = self.excused | set(self.records.ranks)
        if any(rank not in known for rank in self.records.groups[group].ranks):
            doubtful.append(lane.issued)
        return min((seq for seq in doubtful if 0 < seq <= lane.issued), default=None)

    def _open_p2p(self, lane: Lane) -> list[Open]:
        """The first open send or receive; of a batch, which is one launch, the one without
        another end."""
        calls = [call for call in lane.p2p if call.is_open]
        if not calls:
            return []
        first = calls[0]
        batch = [c for c in calls if c.is_batched and c.p2p_seq == first.p2p_seq] or [first]
        lone = (c for c in batch if (lane.rank, lane.group, c.at) in self.unpaired)
        call = next(lone, first)
        return [Open(call.at, lane.group, call.p2p_seq, call.call, call.site, True)]

    def _strong_of(self, rank: int, call: Open) -> tuple[Lack, ...]:
        key = key_of(rank, call)
        if key not in self._strong:
            found = self._p2p_lacks(rank, call) if call.is_p2p else list(self._members_lacking(key))
            living = [lack for lack in found if lack.why is not Why.NO_DUMP]
            dead = [lack for lack in found if lack.rank not in self.victims]
            # A call that a living rank has not made waits for that rank in any case.
            self._strong[key] = tuple(living or dead)
        return self._strong[key]

    def _members_lacking(self, key: Key) -> Iterator[Lack]:
        for rank in self.records.groups[key.group].ranks:
            lane = self.lanes.of[key.group].get(rank)
            if rank in self.excused:
                continue
            if rank not in self.records.ranks:
                yield Lack(rank, Why.NO_DUMP)
            elif (lane.issued if lane else 0) < key.seq:
                yield Lack(rank, Why.NOT_CALLED)

    def _p2p_lacks(self, rank: int, call: Open) -> list[Lack]:
        peer = self._peer(call)
        if peer is not None and peer not in self.records.ranks:
            return [] if peer in self.excused else [Lack(peer, Why.NO_DUMP)]
        lone = self.unpaired.get((rank, call.group, call.at))
        return [] if lone is None else [Lack(lone, Why.NOT_POSTED)]

    def _peer(self, call: Open) -> int | None:
        ranks, peer = self.records.groups[call.group].ranks, self.records.calls[call.call].peer
        return ranks[peer] if peer is not None and peer < len(ranks) else None

    def _elsewhere(self, key: Key, call: Open, blocked: Mapping[int, Open]) -> tuple[Lack, ...]:
        """Members that made the call too, but stand at another one of their own."""
        others = self.records.groups[key.group].ranks
        if call.is_p2p:
            peer = self._peer(call)
            others = () if peer is None else (peer,)
            return tuple(
                Lack(r, Why.ELSEWHERE)
                for r in others
                if r in blocked and not self._meets(blocked[r], call, key.owner)
            )
        return tuple(
            Lack(r, Why.ELSEWHERE) for r in others if r in blocked and key_of(r, blocked[r]) != key
        )

    def _meets(self, theirs: Open, mine: Open, rank: int) -> bool:
        """Whether the peer stands at the other end of this send or receive."""
        if not theirs.is_p2p or theirs.group != mine.group:
            return False
        ops = {self.records.calls[theirs.call].op, self.records.calls[mine.call].op}
        return self._peer(theirs) == rank and len(ops) == 2

    def _unjoined(
        self, opens: Mapping[int, tuple[Open, ...]]
    ) -> Iterator[tuple[int, Open, tuple[Lack, ...]]]:
        """Members that have not created a group which others created and cannot use yet."""
        for index, group in enumerate(self.records.groups):
            present = [rank for rank in group.ranks if rank in self.records.ranks]
            have = [rank for rank in present if index in self.records.ranks[rank].configured]
            lack = [r for r in present if r not in have and self.records.ranks[r].configured]
            used = any(lane.issued for lane in self.lanes.of[index].values())
            if group.is_declared and lack and have and not used:
                lacks = tuple(Lack(rank, Why.NOT_JOINED) for rank in lack)
                yield from (
                    (rank, Open(1 << 62, index, 1), lacks) for rank in have if not opens[rank]
                )


def _open_call(lane: Lane, group: int, seq: int) -> Open:
    at = lane.position(seq)
    if at is None:
        return Open(-1, group, seq)
    return Open(lane.at[at], group, seq, lane.call[at], lane.site[at])
