"""Turns watchdog lines (torch 1.13 to 2.13) and tracebacks into what each rank said of itself.

People paste these lines when they have no dumps. One line names its rank as `[rank3]:` (2.2 and
later), as `[Rank 3]` or `[PG ... Rank 3]` (rank inside the group), by the launcher's prefix, or by
the name of the file it stands in. What a line means:

* `Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=…)`: the call it hangs in
* `last enqueued work: 10, last completed work: 6` (four wordings): its frontier in that group
* `Received a dump signal …`: it is alive, and its frontier in the default group
* `remote process exited`, `Connection closed by peer`: somebody else died first
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from flightrec.logbook import (
    DEFAULT_GROUP,
    NO_GROUP,
    GroupSaid,
    Lagging,
    LauncherExit,
    LogBook,
    Raised,
    RankLog,
    group_key,
    merge_logs,
    merge_said,
)
from flightrec.model import Frame, Frontier, Site, Work

LINE_MAX = 20_000  # characters looked at in one line; some programs log whole tensors

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GLOBAL_RANK = re.compile(r"\[rank(\d+)\]:?", re.IGNORECASE)
_LAUNCHER_RANK = re.compile(r"^(?:\[(?:default|trainer)(\d+)\]:|(\d{1,6}): )")
_PREFIX = re.compile(
    r"^(?:.*?\[rank\d+\]:\s?|\[(?:default|trainer)\d+\]:\s?|\d{1,6}: )", re.IGNORECASE
)
_BARE_RANK = re.compile(r"\[Rank (\d+)\]")
_GROUP = re.compile(
    r"\[PG (?:ID \d+ PG GUID (?P<guid>[^\s(\]]+)|(?P<uid>[^\s(\]]+))"
    r"\s*(?:\((?P<desc>[^)]*)\))? Rank (?P<rank>\d+)\]"
)
_WORK = re.compile(
    r"Work\w+\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?"
    r"(?:, NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+))?"
    r"(?:, Timeout\(ms\)=(?P<timeout>\d+))?\)"
)
_RAN = re.compile(r"ran for (\d+) milliseconds")
_FAILED = re.compile(
    r"(?:detected by watchdog at work(?: sequence id)?|Timeout at \w+ work|hit in \w+ work)"
    r": (\d+)"
)
_STATUS = re.compile(
    r"[Ll]ast enqueued (?:\w+ )?work: (-?\d+), last completed (?:\w+ )?work: (-?\d+)"
)
_ANSWERED = re.compile(
    r"Received a (?:dump|timeout|global timeout) ?(?:signal)?|Observed flight recorder dump signal"
    r"|preparing to dump debug info"
)
_SIGNALLED = re.compile(r"collective timeout from +rank (\d+)")
_REMOTE_EXIT = re.compile(
    r"remote process exited|ncclRemoteError|Connection closed by (?:remote )?peer"
    r"|Connection reset by peer|failed to recv, got 0 bytes|TCPStore server has shut down"
)
_COMMUNICATION = re.compile(
    r"NCCL (?:error|communicator)|nccl\w*Error|DistBackendError|DistNetworkError|DistStoreError"
    r"|[Cc]onnection (?:closed|reset|refused)|[Tt]imed? ?out|Broken pipe|KeyboardInterrupt"
    r"|SystemExit|SignalException|ChildFailedError"
)
_SITE = re.compile(r"^#(\d+) (.+?) from (.+):(\d+)\s*$")
_TRACE = re.compile(r'^\s+File "(.+?)", line (\d+), in (.+?)\s*$')
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure)\b.*)$")
_PROCESS = re.compile(r"^(?:\[[\d\- :.]+\] )?([\w.-]+):(\d+):\d+ \[\d+\] .*NCCL")
_DESYNC = re.compile(r"\[([\d, ]+)\] finished collective #(\d+), but didn't join collective #")
_TABLE_RANK = re.compile(r"(?m)^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_TABLE_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+)")
_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_SETUP = re.compile(r"setting up NCCL communicator and retr\w+ ncclUniqueId from \[(\d+)\]")
_CLIENTS = re.compile(r"(\d+)/(\d+) clients joined")
_WORLD = re.compile(r"\b(?:world_size|WORLD_SIZE|nranks|nRanks)[\s=:]+(\d+)\b")
_TOKENS = (  # each pattern above needs one of these, or follows a line that has one
    *("NCCL", "Work", "[PG ", "ast enqueued", "dump", "remote process", "onnection ", "Traceback"),
    *("failed to recv", "TCPStore", "finished collective", "local_rank", "exitcode", "Root Cause"),
    *("monitoredBarrier", "clients joined", "world_size", "WORLD_SIZE", "nranks", "nRanks"),
    *("Stack trace of", "ncclRemoteError"),
)
_FILE_RANK = (
    re.compile(r"(?:^|[^a-z])rank[_\-.]?(\d+)(?:\D|$)", re.IGNORECASE),
    re.compile(r"attempt_\d+/(\d+)/std(?:err|out)\.log$"),
    re.compile(r"^(?:.*/)?(?:stderr|stdout|log|trainer|worker)?[_\-.]?(\d+)\.(?:log|txt|err|out)$"),
)


def rank_from_name(name: str) -> int | None:
    """Return the rank that the name of a log file states."""
    for pattern in _FILE_RANK:
        if found := pattern.search(name):
            return int(found[1])
    return None


def looks_like_log(text: str) -> bool:
    """Say whether `text` has a line that this reader understands."""
    marks = (_WORK, _STATUS, _ANSWERED, _REMOTE_EXIT, _BARRIER, _SETUP, _CLIENTS, _TABLE_RANK)
    return any(mark.search(text) for mark in marks)


def _may_matter(line: str) -> bool:
    """A cheap look before the patterns: training output is a million times more than the rest."""
    return any(token in line for token in _TOKENS)


def is_echo(text: str) -> bool:
    """Say whether an exception only tells that somebody else is gone or late."""
    return bool(_COMMUNICATION.search(text))


def understands(line: str) -> bool:
    """Say whether the reader takes anything from this line."""
    text = _ANSI.sub("", line.rstrip("\n"))
    bare = _PREFIX.sub("", text)
    marks = (_WORK, _STATUS, _ANSWERED, _REMOTE_EXIT, _BARRIER, _SETUP, _CLIENTS, _PROCESS, _DESYNC)
    if any(mark.search(text) for mark in marks) or _TABLE_EXIT.match(text):
        return True
    if "Traceback (most recent" in text or "Root Cause (first" in text or "Stack trace of" in text:
        return True
    return any(mark.match(bare) for mark in (_SITE, _TRACE, _RAISED, _TABLE_RANK))


def read_logs(files: Iterable[tuple[str, Iterable[str]]]) -> LogBook:
    """Read (name, lines) pairs: one file a rank, or pasted lines of many ranks in one file."""
    scans: list[_Scan] = []
    for name, lines in sorted(files, key=lambda pair: pair[0]):
        scan = _Scan(name, rank_from_name(name))
        for line in lines:
            scan.line(line[:LINE_MAX])
        scans.append(scan)
    return _join(scans)


class _Scan:
    """Reads one file from top to bottom and remembers what is needed across lines."""

    def __init__(self, source: str, file_rank: int | None) -> None:
        self.source = source
        self.file_rank = file_rank
        self.ranks: dict[int, RankLog] = {}
        self.lagging: list[Lagging] = []
        self.exits: list[LauncherExit] = []
        self.absent: set[int] = set()
        self.signalled: set[int] = set()
        self.clients: tuple[int, int] | None = None
        self.world_size: int | None = None
        self.lines = 0
        self._speaker: int | None = file_rank
        self._works: dict[tuple[int, int], Work] = {}
        self._frames: list[Frame] | None = None
        self._trace: list[Frame] | None = None
        self._trace_rank: int | None = None
        self.orphans: list[Raised] = []
        self._table_rank: int | None = None
        self._is_first_cause = False
        if file_rank is not None:
            self._change(file_rank, is_own_file=True)

    def line(self, raw: str) -> None:
        self.lines += 1
        if self._frames is None and self._trace is None and not _may_matter(raw):
            return
        text = _ANSI.sub("", raw.rstrip("\n"))
        self._continue_stack(text)
        rank = self._rank_of(text)
        if rank is not None:
            self._speaker = rank
            self._watchdog(rank, text)
        self._launcher(text)
        said_by = rank if _PREFIX.match(text) else self.file_rank
        self._traceback(said_by, _PREFIX.sub("", text))

    def _rank_of(self, text: str) -> int | None:
        if found := _GLOBAL_RANK.search(text):
            return int(found[1])
        if self.file_rank is not None:
            return self.file_rank
        group = _GROUP.search(text)
        if group and (group["guid"] or group["uid"]) == DEFAULT_GROUP:
            return int(group["rank"])
        if found := _BARE_RANK.search(text):
            return int(found[1])
        if found := _LAUNCHER_RANK.search(text):
            return int(found[1] or found[2])
        return self._speaker if text[:1].isspace() or text.startswith("#") else None

    def _of(self, rank: int) -> RankLog:
        return self.ranks.setdefault(rank, RankLog(rank=rank, source=self.source))

    def _change(self, rank: int, **changes: object) -> None:
        self.ranks[rank] = replace(self._of(rank), **changes)  # type: ignore[arg-type]

    def _watchdog(self, rank: int, text: str) -> None:
        work = _work_of(text)
        if work is not None:
            self._works[rank, work.seq] = work
        if found := _GROUP.search(text):
            self._group(rank, text, found, work)
        elif work is not None and ("timeout:" in text or "exception" in text):
            self._hang(rank, work)
        if _ANSWERED.search(text):
            self._change(rank, has_answered=True, is_silent=False)
            if found := _SIGNALLED.search(text):
                self.signalled.add(int(found[1]))
        if _REMOTE_EXIT.search(text) and not self._has_given_up(rank, text):
            self._change(rank, saw_remote_exit=True)
        if "Stack trace of the failed collective:" in text:
            self._frames = []
        if found := _PROCESS.search(text):
            self._change(rank, host=found[1], pid=int(found[2]))
        if found := _SETUP.search(text):
            self._change(rank, setup_waits_for=int(found[1]), is_silent=False)
        if found := _DESYNC.search(text):
            self._desync(rank, found[1], int(found[2]))

    def _has_given_up(self, rank: int, text: str) -> bool:
        """Connections that close after a time-out are its consequence: processes are torn down."""
        if "async exception" in text:
            return False
        log = self._of(rank)
        return log.has_answered or any(said.has_failed for said in log.groups)

    def _hang(self, rank: int, work: Work) -> None:
        """A time-out line names no group: keep it under no group until another line does."""
        known = any(
            said.frontier.waiting and said.frontier.waiting.seq == work.seq
            for said in self._of(rank).groups
        )
        if not known:
            frontier = Frontier(last_enqueued=work.seq, last_completed=-1, waiting=work)
            self._say(rank, GroupSaid(name=NO_GROUP, frontier=frontier, has_failed=True))
        self._change(rank, is_silent=False)

    def _group(self, rank: int, text: str, found: re.Match[str], work: Work | None) -> None:
        name = found["guid"] or found["uid"]
        desc = found["desc"] or ("default_pg" if name == DEFAULT_GROUP else "")
        said = GroupSaid(name=name, desc=desc, group_rank=int(found["rank"]))
        if status := _STATUS.search(text):
            enqueued, completed = int(status[1]), int(status[2])
            said = replace(
                said,
                frontier=Frontier(last_enqueued=enqueued, last_completed=completed),
                has_status=True,
            )
        failed = _FAILED.search(text)
        seq = int(failed[1]) if failed else work.seq if work else None
        if seq is not None:
            waiting = self._works.get((rank, seq)) or Work(seq=seq, op="")
            said = replace(said, frontier=replace(said.frontier, waiting=waiting), has_failed=True)
            self._forget_groupless(rank, seq)
        self._say(rank, said)
        self._change(rank, is_silent=False)

    def _forget_groupless(self, rank: int, seq: int) -> None:
        groups = self._of(rank).groups
        kept = [g for g in groups if g.name != NO_GROUP or g.open_seq != seq]
        self._change(rank, groups=tuple(kept))

    def _say(self, rank: int, said: GroupSaid) -> None:
        groups = {group_key(g): g for g in self._of(rank).groups}
        key = group_key(said)
        groups[key] = merge_said(groups[key], said) if key in groups else said
        self._change(rank, groups=tuple(groups[k] for k in sorted(groups)))

    def _desync(self, rank: int, ranks: str, seq: int) -> None:
        for lagging in ranks.split(","):
            self.lagging.append(Lagging(reporter=rank, rank=int(lagging), finished_seq=seq))

    def _launcher(self, text: str) -> None:
        if "Root Cause (first observed failure)" in text:
            self._is_first_cause = True
        if found := _TABLE_RANK.search(text):
            self._table_rank = int(found[1])
        if (found := _TABLE_EXIT.search(text)) and self._table_rank is not None:
            self.exits.append(
                LauncherExit(
                    rank=self._table_rank, code=int(found[1]), is_first=self._is_first_cause
                )
            )
            self._table_rank, self._is_first_cause = None, False
        if found := _BARRIER.search(text):
            self.absent.update(int(rank) for rank in found[1].split(",") if rank.strip())
        if found := _CLIENTS.search(text):
            self.clients = int(found[1]), int(found[2])
        if found := _WORLD.search(text):
            self.world_size = max(int(found[1]), self.world_size or 0)

    def _continue_stack(self, text: str) -> None:
        """Stacks follow their heading as `#0 name from file:line`."""
        if self._frames is None or self._speaker is None:
            return
        if found := _SITE.match(_PREFIX.sub("", text)):
            self._frames.append(Frame(name=found[2], filename=found[3], line=int(found[4])))
            return
        if self._frames:
            sites = self._of(self._speaker).sites
            site = tuple(self._frames)
            if site not in sites:
                self._change(self._speaker, sites=(*sites, site))
        self._frames = None

    def _traceback(self, rank: int | None, text: str) -> None:
        if text.strip() == "Traceback (most recent call last):":
            self._trace, self._trace_rank = [], rank
        elif self._trace is not None:
            if found := _TRACE.match(text):
                self._trace.append(Frame(name=found[3], filename=found[1], line=int(found[2])))
            elif found := _RAISED.match(text):
                self._raise(found[1].strip(), tuple(reversed(self._trace)))
                self._trace = None
            elif text and not text[0].isspace():
                self._trace = None

    def _raise(self, text: str, site: Site) -> None:
        """Keep the first exception that is more than an echo of somebody else's end."""
        if "torch.distributed.elastic" in text:
            return
        raised = Raised(text=text[:300], site=site, is_communication=is_echo(text))
        rank = self._trace_rank
        if rank is None:
            self.orphans.append(raised)
            return
        before = self._of(rank).raised
        if before is None or (before.is_communication and not raised.is_communication):
            self._change(rank, raised=raised)


def _work_of(text: str) -> Work | None:
    found = _WORK.search(text)
    if not found:
        return None
    ran = _RAN.search(text)
    return Work(
        seq=int(found["seq"]),
        op=found["op"].lower().lstrip("_"),
        numel_in=_numel(found["numel_in"]),
        numel_out=_numel(found["numel_out"]),
        timeout_ms=int(found["timeout"]) if found["timeout"] else None,
        ran_ms=int(ran[1]) if ran else None,
    )


def _numel(text: str | None) -> int | None:
    """The size, unless it is the 2**64-1 that torch prints for a coalesced call."""
    return int(text) if text and int(text) < 2**63 else None


def _join(scans: list[_Scan]) -> LogBook:
    ranks: dict[int, RankLog] = {}
    for scan in scans:
        for rank, log in scan.ranks.items():
            ranks[rank] = merge_logs(ranks[rank], log) if rank in ranks else log
    sizes = [scan.world_size for scan in scans if scan.world_size]
    clients = [scan.clients for scan in scans if scan.clients]
    return LogBook(
        ranks={rank: ranks[rank] for rank in sorted(ranks)},
        world_size=max(sizes) if sizes else (max(clients)[1] if clients else None),
        lagging=tuple(
            sorted(
                {x for scan in scans for x in scan.lagging},
                key=lambda x: (x.reporter, x.rank, x.finished_seq),
            )
        ),
        exits=tuple(
            sorted({x for s in scans for x in s.exits}, key=lambda x: (not x.is_first, x.rank))
        ),
        absent=tuple(sorted({rank for scan in scans for rank in scan.absent})),
        clients=max(clients) if clients else None,
        signalled=tuple(sorted({rank for scan in scans for rank in scan.signalled})),
        orphans=tuple(sorted({x for s in scans for x in s.orphans}, key=lambda x: x.text)),
        lines=sum(scan.lines for scan in scans),
    )
