"""Who waits where, who is idle, who is silent: what follows directly from a LogBook.

Lines name a group by a number that is equal on all members, and the rank inside it, but never its
members. Members are those who spoke of it; how many there should be follows from groups of the
same description ("tp"), because such groups are of one size in practice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flightrec.exits import exits_from_logs
from flightrec.logbook import DEFAULT_GROUP, NO_GROUP, GroupSaid, LogBook, RankLog
from flightrec.model import Evidence, Group, RankRecord, Records, Site, Work

P2P_OPS = {"send", "recv", "coalesced"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One rank waits in one call."""

    rank: int
    group: str
    desc: str
    seq: int
    work: Work | None = None
    site: Site = ()

    @property
    def op(self) -> str:
        return self.work.op if self.work else ""

    own_enqueued: int = -1  # of this rank in this group; -1: not printed

    @property
    def is_p2p(self) -> bool:
        """Sends and receives have numbers of their own, which may pass those of collectives."""
        return self.op in P2P_OPS or (not self.op and 0 <= self.own_enqueued < self.seq)

    @property
    def call(self) -> str:
        return f"{self.op or 'call'} #{self.seq} of {group_label(self.group, self.desc)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place in a group about which nobody has spoken, while others wait in that group."""

    group: str
    desc: str
    seq: int
    is_lagging: bool  # groups of the same description have passed this call long ago


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The facts that the log verdict is made of."""

    book: LogBook
    evidence: Evidence
    waits: tuple[Wait, ...]
    behind: Mapping[int, Wait]  # rank that has not issued a call -> one that waits for it there
    idle: tuple[int, ...]  # alive, and waiting in nothing
    silent: tuple[int, ...]  # their log is here and ends without a word of the watchdog
    unheard: tuple[int, ...]  # ranks that must exist and of which there is no line at all
    slots: tuple[Slot, ...]
    members: Mapping[str, tuple[int, ...]]

    @property
    def waiting_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({wait.rank for wait in self.waits}))

    def wait_of(self, rank: int) -> Wait | None:
        """The call that this rank hangs in first, as far as its lines tell."""
        own = [wait for wait in self.waits if wait.rank == rank]
        return min(own, key=lambda w: (w.group == DEFAULT_GROUP, w.group, w.seq), default=None)


def group_label(name: str, desc: str) -> str:
    if name in (DEFAULT_GROUP, NO_GROUP):
        return "default_pg"
    return f"{desc}[{name}]" if desc else f"group {name}"


def look(
    book: LogBook, *, evidence: Evidence | None = None, world_size: int | None = None
) -> LogView:
    """Derive the facts. `world_size` may be given when no line states it."""
    book_size = world_size or book.world_size
    groups = _by_group(book)
    waits = tuple(_waits(book))
    waiting = {wait.rank for wait in waits}
    members = {name: tuple(sorted(said)) for name, said in groups.items()}
    idle = tuple(r for r, log in book.ranks.items() if log.has_answered and r not in waiting)
    return LogView(
        book=book,
        evidence=evidence or Evidence(exits=exits_from_logs(book)),
        waits=waits,
        behind=_behind(groups, waits, book),
        idle=idle,
        silent=tuple(r for r, log in book.ranks.items() if _is_silent(log)),
        unheard=_unheard(book, book_size),
        slots=tuple(_slots(groups, waits)),
        members=members,
    )


def _is_silent(log: RankLog) -> bool:
    echoes = log.raised is not None and log.raised.is_communication
    return log.is_silent and log.is_own_file and not log.saw_remote_exit and not echoes


def _by_group(book: LogBook) -> dict[str, dict[int, GroupSaid]]:
    """group name -> rank -> what it said; a name that two groups share is left out."""
    groups: dict[str, dict[int, GroupSaid]] = defaultdict(dict)
    for rank, log in book.ranks.items():
        for said in log.groups:
            first = groups[said.name].get(rank)
            if first is None or (said.open_seq or 0) < (first.open_seq or 0):
                groups[said.name][rank] = said
    return {name: said for name, said in sorted(groups.items()) if not _is_shared(said)}


def _is_shared(said: Mapping[int, GroupSaid]) -> bool:
    places = Counter(s.group_rank for s in said.values() if s.group_rank is not None)
    return any(count > 1 for count in places.values())


def _waits(book: LogBook) -> Iterator[Wait]:
    for rank, log in book.ranks.items():
        site = log.sites[0] if len(log.sites) == 1 and len(_failed(log)) == 1 else ()
        for said in log.groups:
            if said.open_seq is None:
                continue
            yield Wait(
                rank=rank,
                group=said.name,
                desc=said.desc,
                seq=said.open_seq,
                work=said.frontier.waiting,
                site=site if said.has_failed else (),
                own_enqueued=said.frontier.last_enqueued if said.has_status else -1,
            )


def _failed(log: RankLog) -> list[GroupSaid]:
    return [said for said in log.groups if said.has_failed]


def _behind(
    groups: Mapping[str, Mapping[int, GroupSaid]], waits: tuple[Wait, ...], book: LogBook
) -> dict[int, Wait]:
    """Ranks whose printed frontier ends before a call in which others wait.

    Point-to-point calls count on their own and say nothing about collectives, so waits in them
    are not compared; a rank that waits in the same group is late there, not absent.
    """
    behind: dict[int, Wait] = {}
    for wait in sorted(waits, key=lambda w: (w.seq, w.rank)):
        if wait.is_p2p or wait.group not in groups:
            continue
        for rank, said in groups[wait.group].items():
            at = said.frontier
            waits_not = rank != wait.rank and said.has_status and said.open_seq is None
            if waits_not and max(at.last_enqueued, at.last_completed) < wait.seq:
                behind.setdefault(rank, wait)
    for lagging in book.lagging:
        wait_ = _reported(lagging.reporter, lagging.finished_seq, waits)
        if wait_ and lagging.rank not in book.ranks:
            behind.setdefault(lagging.rank, wait_)
    return dict(sorted(behind.items()))


def _reported(reporter: int, finished_seq: int, waits: tuple[Wait, ...]) -> Wait | None:
    """The wait that a desync report is about. Its ranks are global only in the default group."""
    for wait in waits:
        is_default = wait.group in (DEFAULT_GROUP, NO_GROUP)
        if wait.rank == reporter and is_default and wait.seq > finished_seq:
            return wait
    return None


def _unheard(book: LogBook, world_size: int | None) -> tuple[int, ...]:
    """Ranks without any line: up to the known world size, else gaps between one file a rank."""
    if not book.ranks:
        return ()
    if world_size is None and not _is_file_per_rank(book):
        return ()
    size = world_size or max(book.ranks) + 1
    spoke = set(book.ranks) | set(book.signalled)
    return tuple(rank for rank in range(size) if rank not in spoke)


def _is_file_per_rank(book: LogBook) -> bool:
    return len(book.ranks) >= 3 and all(log.is_own_file for log in book.ranks.values())


def _slots(
    groups: Mapping[str, Mapping[int, GroupSaid]], waits: tuple[Wait, ...]
) -> Iterator[Slot]:
    """Free places of groups in which somebody waits, by the size of groups described alike."""
    sizes: dict[str, int] = defaultdict(int)
    passed: dict[str, int] = defaultdict(int)
    for said in groups.values():
        for one in said.values():
            if one.group_rank is not None:
                sizes[one.desc] = max(sizes[one.desc], one.group_rank + 1, len(said))
            passed[one.desc] = max(passed[one.desc], one.frontier.last_completed)
    first = {}
    for wait in sorted(waits, key=lambda w: w.seq, reverse=True):
        first[wait.group] = wait
    for name, wait in sorted(first.items()):
        if name in (DEFAULT_GROUP, NO_GROUP) or name not in groups or wait.is_p2p:
            continue
        size = max(2, sizes[wait.desc]) if wait.desc else 2
        for _ in range(size - len(groups[name])):
            lagging = passed[wait.desc] >= wait.seq
            yield Slot(group=name, desc=wait.desc, seq=wait.seq, is_lagging=lagging)


def records_of(book: LogBook) -> Records:
    """The frontiers as records without entries, for matrix and page."""
    groups = _by_group(book)
    names = list(groups)
    descs = {n: next((s.desc for s in groups[n].values() if s.desc), "") for n in names}
    return Records(
        ranks={
            rank: RankRecord(
                rank=rank,
                source=log.source,
                host=log.host,
                frontiers={
                    names.index(said.name): said.frontier
                    for said in log.groups
                    if said.name in groups and (said.has_status or said.open_seq is not None)
                },
            )
            for rank, log in book.ranks.items()
        },
        groups=tuple(
            Group(
                name=name,
                desc=group_label(name, descs[name]),
                ranks=tuple(sorted(groups[name])),
                is_declared=False,
            )
            for name in names
        ),
    )
