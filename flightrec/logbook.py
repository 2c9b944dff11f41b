"""What the log lines of all ranks say: the values that the reader fills and the verdict uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from flightrec.model import Frontier, Site

DEFAULT_GROUP = "0"  # the name that torch gives the group of all ranks
NO_GROUP = ""  # torch 2.1 and older do not say which group a line is about


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSaid:
    """What one rank's lines say of one group."""

    name: str
    desc: str = ""
    group_rank: int | None = None
    frontier: Frontier = field(default_factory=Frontier)
    has_failed: bool = False  # the watchdog gave up on a call of this group
    has_status: bool = False  # its frontier was printed, not inferred

    @property
    def open_seq(self) -> int | None:
        """The call that this rank waits in, if it waits."""
        at = self.frontier
        if at.waiting is not None:
            return at.waiting.seq
        return at.last_completed + 1 if at.last_enqueued > at.last_completed >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The Python exception that a rank's log shows."""

    text: str  # "ValueError: loss is nan"
    site: Site = ()  # innermost first
    is_communication: bool = False  # it only says that somebody else is gone or late


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """All that one rank's lines say."""

    rank: int
    source: str = ""
    groups: tuple[GroupSaid, ...] = ()
    has_answered: bool = False  # it heard the dump signal, so its process was alive then
    saw_remote_exit: bool = False
    raised: Raised | None = None
    sites: tuple[Site, ...] = ()  # stacks of failed calls; the line does not say of which group
    host: str = ""
    pid: int | None = None
    is_silent: bool = True  # no line of the recorder or watchdog at all
    is_own_file: bool = False  # a file of this rank alone was given
    setup_waits_for: int | None = None  # group rank that never published the communicator id

    @property
    def is_waiting(self) -> bool:
        return any(said.open_seq is not None for said in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lagging:
    """One line of NCCL's desync report: `rank` finished `seq` and joined nothing after it."""

    reporter: int
    rank: int  # inside the group of the report
    finished_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherExit:
    """A line of torchrun's failure table: how a rank's process ended."""

    rank: int
    code: int
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBook:
    """What all logs say together; the same whatever the order of files."""

    ranks: dict[int, RankLog]
    world_size: int | None = None
    lagging: tuple[Lagging, ...] = ()
    exits: tuple[LauncherExit, ...] = ()
    absent: tuple[int, ...] = ()  # ranks that monitored_barrier found missing
    clients: tuple[int, int] | None = None  # joined and expected, when the rendezvous timed out
    signalled: tuple[int, ...] = ()  # ranks that told others to dump, so they lived and waited
    orphans: tuple[Raised, ...] = ()  # exceptions in pasted lines that name no rank
    lines: int = 0


def group_key(said: GroupSaid) -> tuple[str, int]:
    """Lines without a group are told apart by the call they name."""
    return said.name, (said.open_seq or 0) if said.name == NO_GROUP else 0


def merge_said(first: GroupSaid, second: GroupSaid) -> GroupSaid:
    """Join what one rank said of one group at two moments: the earliest open call is the hang."""
    one, two = first.frontier, second.frontier
    waits = [w for w in (one.waiting, two.waiting) if w is not None]
    return GroupSaid(
        name=first.name,
        desc=first.desc or second.desc,
        group_rank=first.group_rank if first.group_rank is not None else second.group_rank,
        has_failed=first.has_failed or second.has_failed,
        has_status=first.has_status or second.has_status,
        frontier=Frontier(
            last_enqueued=max(one.last_enqueued, two.last_enqueued),
            last_completed=max(one.last_completed, two.last_completed),
            waiting=min(waits, key=lambda w: (w.seq, w.op == "")) if waits else None,
        ),
    )


def merge_logs(first: RankLog, second: RankLog) -> RankLog:
    """Join what two files say of one rank (stdout and stderr, or parts of a paste)."""
    groups = {group_key(g): g for g in first.groups}
    for said in second.groups:
        key = group_key(said)
        groups[key] = merge_said(groups[key], said) if key in groups else said
    raised = [r for r in (first.raised, second.raised) if r is not None]
    return RankLog(
        rank=first.rank,
        source=first.source if not first.is_silent or second.is_silent else second.source,
        groups=tuple(groups[k] for k in sorted(groups)),
        has_answered=first.has_answered or second.has_answered,
        saw_remote_exit=first.saw_remote_exit or second.saw_remote_exit,
        raised=min(raised, key=lambda r: r.is_communication) if raised else None,
        sites=tuple(dict.fromkeys(first.sites + second.sites)),
        host=first.host or second.host,
        pid=first.pid if first.pid is not None else second.pid,
        is_silent=first.is_silent and second.is_silent,
        is_own_file=first.is_own_file or second.is_own_file,
        setup_waits_for=first.setup_waits_for
        if first.setup_waits_for is not None
        else second.setup_waits_for,
    )
