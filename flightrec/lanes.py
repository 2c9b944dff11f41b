"""Lay each rank's calls out by group: lanes that can be compared with one another.

A lane is one rank's collectives in one group by sequence number, and its sends and receives.
Lanes hold numbers only, in arrays, so that equal stretches are found equal at the speed of memcmp.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from flightrec.model import (
    FLAG_RETIRED,
    STATE_COMPLETED,
    STATE_STARTED,
    Columns,
    Frontier,
    RankRecord,
    Records,
)
from flightrec.tokens import Token, token_of

_OPEN_NCCL = bytes(0 if flags & 3 == STATE_COMPLETED else 1 for flags in range(256))
_RETIRED = bytes(1 if flags & FLAG_RETIRED else 0 for flags in range(256))
# Writers of these never move an entry past "scheduled"; only "retired" shows that it ended.
RETIRED_MEANS_ENDED = ("gloo", "mpi", "ucc")


@dataclass(frozen=True, slots=True)
class P2P:
    """One send or receive, with the state of the batch that it belongs to."""

    at: int  # index into the rank's columns
    p2p_seq: int
    is_send: bool
    own: int  # group-local rank
    peer: int
    call: int
    site: int
    is_open: bool
    is_batched: bool
    is_started: bool


@dataclass(slots=True)
class Lane:
    """One rank's calls in one group. `seq` grows; the other arrays go along with it."""

    rank: int
    group: int
    seq: array[int]
    token: array[int]
    call: array[int]
    site: array[int]
    at: array[int]
    first_open: int  # position of the first call that has not completed; len(seq): none
    started: frozenset[int] = frozenset()  # positions seen started but not completed
    p2p: tuple[P2P, ...] = ()
    is_wrapped: bool = False
    frontier: Frontier | None = None  # in log-only mode this is all there is
    is_contiguous: bool = True
    has_sites: bool = False  # its dump holds stacks
    issued: int = 0  # highest sequence number that the rank called

    @property
    def open_seq(self) -> int | None:
        """Sequence number of the first call that has not completed."""
        if self.frontier is not None:
            return _open_of_frontier(self.frontier)
        return self.seq[self.first_open] if self.first_open < len(self.seq) else None

    def position(self, seq: int) -> int | None:
        """Where in the arrays `seq` is; None when the lane does not show it."""
        if not self.seq or not self.seq[0] <= seq <= self.seq[-1]:
            return None
        if self.is_contiguous:
            return seq - self.seq[0]
        try:
            return self.seq.index(seq)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """All lanes, by group and rank, and the tokens that their numbers stand for."""

    of: Mapping[int, Mapping[int, Lane]]  # group -> rank -> lane
    tokens: tuple[Token, ...]
    token_of_call: tuple[int, ...] = ()  # index of Records.calls -> index of tokens


def lay_out(records: Records) -> Lanes:
    """Build the lanes of every rank. Linear in entries."""
    numbers: dict[Token, int] = {}
    token_of_call = [numbers.setdefault(token_of(c), len(numbers)) for c in records.calls]
    kinds = bytes(1 if c.is_p2p else 2 if c.op == "coalesced" else 0 for c in records.calls)
    lanes: dict[int, dict[int, Lane]] = {index: {} for index in range(len(records.groups))}
    combined: dict[tuple[int, ...], int] = {}
    tokens = list(numbers)
    builder = _Builder(records, token_of_call, kinds, tokens, combined)
    for rank, record in records.ranks.items():
        for lane in builder.lanes_of(record):
            lanes[lane.group][rank] = lane
    return Lanes(of=lanes, tokens=tuple(tokens), token_of_call=tuple(token_of_call))


@dataclass(slots=True)
class _Builder:
    records: Records
    token_of_call: list[int]
    kinds: bytes
    tokens: list[Token]
    combined: dict[tuple[int, ...], int]
    known: dict[object, Lane] = field(default_factory=dict)

    def lanes_of(self, record: RankRecord) -> list[Lane]:
        if record.columns is None:
            return [_frontier_lane(record.rank, g, f) for g, f in record.frontiers.items()]
        by_group = _split(record.columns)
        lanes = [self._lane(record, group, at) for group, at in by_group.items()]
        unused = record.configured - set(by_group)
        return lanes + [self._lane(record, group, array("I")) for group in sorted(unused)]

    def _lane(self, record: RankRecord, group: int, at: array[int]) -> Lane:
        """Ranks of one role have equal columns, which are one object: their lanes share arrays."""
        c = record.columns
        assert c is not None
        ids = tuple(map(id, (c.seq, c.p2p_seq, c.call, c.site, c.flags)))
        key = (ids, record.first_record_id > 0, record.library, at.tobytes())
        if key not in self.known:
            self.known[key] = self._built(record, group, at)
        lane = copy(self.known[key])
        lane.rank, lane.group = record.rank, group
        status = record.frontiers.get(group)
        if status is not None and not lane.p2p and record.library.startswith("nccl"):
            lane.issued = max(lane.issued, status.last_enqueued)
        return lane

    def _built(self, record: RankRecord, group: int, at: array[int]) -> Lane:
        columns = record.columns
        assert columns is not None
        calls = _pick(columns.call, at)
        p2p: tuple[P2P, ...] = ()
        if any(self.kinds[call] for call in set(calls)):
            at, p2p = self._without_p2p(columns, at, record.library)
            calls = _pick(columns.call, at)
        seq = _pick(columns.seq, at)
        flags = bytes(_pick(columns.flags, at))
        tokens = array("I", map(self.token_of_call.__getitem__, calls))
        sites = _pick(columns.site, at)
        if record.first_record_id > 0 and at and at[0] == 0:
            torn = _torn_launch(seq, calls, self.kinds)
            seq, tokens, calls, sites, at = (c[torn:] for c in (seq, tokens, calls, sites, at))
            flags = flags[torn:]
        if len(set(seq)) < len(seq):
            seq, tokens, calls, sites, at, flags = self._merged(
                seq, tokens, calls, sites, at, flags
            )
        lane = Lane(
            record.rank, group, seq, tokens, calls, sites, at, _first_open(flags, record.library)
        )
        lane.started = _started(flags)
        lane.p2p = p2p
        lane.has_sites = any(self.records.sites[site] for site in set(sites))
        lane.is_wrapped = record.first_record_id > 0
        lane.is_contiguous = not seq or seq[-1] - seq[0] == len(seq) - 1
        lane.issued = seq[-1] if seq else 0
        return lane

    def _without_p2p(
        self, columns: Columns, at: array[int], library: str
    ) -> tuple[array[int], tuple[P2P, ...]]:
        """Split off sends and receives; a "coalesced" entry after them closes their batch and
        alone knows its state."""
        collectives, batch = array("I"), list[int]()
        done: list[P2P] = []
        for index in at:
            kind = self.kinds[columns.call[index]]
            if kind == 1:
                if batch and columns.p2p_seq[batch[0]] != columns.p2p_seq[index]:
                    done += [self._p2p(columns, i, None, library) for i in batch]
                    batch = []
                batch.append(index)
                continue
            closes = kind == 2 and batch
            done += [self._p2p(columns, i, index if closes else None, library) for i in batch]
            batch = []
            if not closes:
                collectives.append(index)
        done += [self._p2p(columns, i, None, library) for i in batch]
        return collectives, tuple(done)

    def _p2p(self, columns: Columns, at: int, closed_by: int | None, library: str) -> P2P:
        call = self.records.calls[columns.call[at]]
        flags = columns.flags[at if closed_by is None else closed_by]
        ended = _RETIRED[flags] if library in RETIRED_MEANS_ENDED else not _OPEN_NCCL[flags]
        return P2P(
            at=at,
            p2p_seq=columns.p2p_seq[at],
            is_send=call.op == "send",
            own=-1 if call.own is None else call.own,
            peer=-1 if call.peer is None else call.peer,
            call=columns.call[at],
            site=columns.site[at],
            is_open=not ended,
            is_batched=closed_by is not None,
            is_started=flags & 3 == STATE_STARTED,
        )

    def _merged(
        self,
        seq: array[int],
        tokens: array[int],
        calls: array[int],
        sites: array[int],
        at: array[int],
        flags: bytes,
    ) -> tuple[array[int], array[int], array[int], array[int], array[int], bytes]:
        """Entries of one sequence number are one launch (a coalesced group): one position, whose
        token stands for all of them and whose state is that of the last."""
        first = [i for i in range(len(seq)) if i == 0 or seq[i] != seq[i - 1]]
        ends = [*first[1:], len(seq)]
        new_tokens = array("I")
        for start, end in zip(first, ends, strict=True):
            new_tokens.append(self._combine(tuple(tokens[start:end])))
        last_flags = bytes(flags[end - 1] for end in ends)
        return (
            _pick(seq, first),
            new_tokens,
            _pick(calls, first),
            _pick(sites, first),
            _pick(at, first),
            last_flags,
        )

    def _combine(self, parts: tuple[int, ...]) -> int:
        if len(parts) == 1:
            return parts[0]
        if parts not in self.combined:
            self.combined[parts] = len(self.tokens)
            known = [self.tokens[part] for part in parts]
            self.tokens.append(
                Token(
                    "+".join(t.op for t in known if t.op != "coalesced"),
                    tuple(d for t in known for d in t.dtypes),
                    tuple(n for t in known for n in t.numels),
                )
            )
        return self.combined[parts]


def _torn_launch(seq: Sequence[int], calls: Sequence[int], kinds: bytes) -> int:
    """How many entries at the start of a wrapped ring are the rest of a launch of several calls,
    whose beginning is gone."""
    size = next((i for i, number in enumerate(seq) if number != seq[0]), len(seq))
    return size if size > 1 or kinds[calls[0]] == 2 else 0


def _split(columns: Columns) -> dict[int, array[int]]:
    groups = sorted(set(columns.group))
    if len(groups) == 1:
        return {groups[0]: array("I", range(len(columns)))}
    found = {group: array("I") for group in groups}
    for index, group in enumerate(columns.group):
        found[group].append(index)
    return found


def _pick(column: array[int], at: Sequence[int]) -> array[int]:
    if len(at) == len(column):
        return column
    return array(column.typecode, map(column.__getitem__, at))


def _first_open(flags: bytes, library: str) -> int:
    """Position of the first call that has not ended.

    gloo's worker threads mark calls as retired a little late and out of order, so a later retired
    call shows that the earlier ones ended too.
    """
    if library in RETIRED_MEANS_ENDED:
        return flags.translate(_RETIRED).rfind(b"\x01") + 1
    found = flags.translate(_OPEN_NCCL).find(b"\x01")
    return len(flags) if found < 0 else found


def _started(flags: bytes) -> frozenset[int]:
    if not any(f & 3 == STATE_STARTED for f in set(flags)):
        return frozenset()
    return frozenset(i for i, f in enumerate(flags) if f & 3 == STATE_STARTED)


def _frontier_lane(rank: int, group: int, frontier: Frontier) -> Lane:
    empty = array("I")
    lane = Lane(rank, group, empty, empty, empty, empty, empty, 0, frontier=frontier)
    waiting = frontier.waiting.seq if frontier.waiting else 0
    lane.issued = max(frontier.last_enqueued, frontier.last_started, waiting, 0)
    return lane


def _open_of_frontier(frontier: Frontier) -> int | None:
    if frontier.waiting is not None:
        return frontier.waiting.seq
    if frontier.last_enqueued > frontier.last_completed >= 0:
        return frontier.last_completed + 1
    return None
