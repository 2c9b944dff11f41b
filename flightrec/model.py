"""The words of the analyzer: what ranks recorded, what else is known, and what follows from it.

Everything is a frozen value. `Records` is what was read, `Evidence` what lies beside it, `Report`
the answer. Records keep only what decides (some 30 bytes an entry, in columns); whole entries are
read again from their source when somebody wants to look at them (`Records.entries`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

SCHEMA = "flightrec/1"  # of Report.to_json; a field is only ever added under the same number
GROUP_UNKNOWN = -1

State = str  # "scheduled", "started" or "completed", as the recorder writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a Python stack."""

    name: str
    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} in {self.name}"


Site = tuple[Frame, ...]  # innermost first, as recorded; empty when the dump holds no stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What was called: equal on all members for most operations, and that is what is compared."""

    library: str  # "nccl", "gloo", …
    op: str  # "all_reduce", "send", "coalesced", … without the library
    own: int | None = None  # group-local rank of this end of a send or recv
    peer: int | None = None  # and of the other end
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    timeout_ms: int | None = None

    @property
    def is_p2p(self) -> bool:
        return self.op in ("send", "recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as all its members see it. Two groups of one name differ by their ranks,
    or, when a name was used again with the same ranks, by their incarnation."""

    name: str
    desc: str
    ranks: tuple[int, ...]  # global ranks in group order
    incarnation: int = 0
    is_declared: bool = True  # False: the members were inferred from who recorded calls (gloo)

    def __str__(self) -> str:
        return self.desc if self.desc and self.desc != "undefined" else (self.name or "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recorded call of one rank, whole. Times are wall-clock nanoseconds; None: not known."""

    record_id: int
    group: int  # index into Records.groups
    seq: int  # collective_seq_id: counts per group, equal on all members
    p2p_seq: int  # counts per group and rank: not equal on the two ends
    op_id: int
    call: Call
    site: Site
    state: State
    is_p2p: bool
    is_retired: bool
    created_ns: int
    started_ns: int | None = None
    completed_ns: int | None = None
    duration_ms: float | None = None
    thread: str = ""

    @property
    def is_completed(self) -> bool:
        return self.state == "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call known only by what a watchdog line prints of it."""

    seq: int
    op: str
    numel_in: int | None = None
    numel_out: int | None = None
    timeout_ms: int | None = None
    ran_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """How far one rank got in one group, by sequence number; -1: not known or nothing yet."""

    last_enqueued: int = -1
    last_started: int = -1
    last_completed: int = -1
    waiting: Work | None = None  # the call that the watchdog saw time out, if it said which


STATE_SCHEDULED, STATE_STARTED, STATE_COMPLETED = 0, 1, 2
FLAG_RETIRED, FLAG_P2P = 4, 8  # above the state in Columns.flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The entries of one rank, oldest first, one array per property.

    `call` and `site` index Records.calls and Records.sites, `group` indexes Records.groups.
    """

    group: array[int]
    seq: array[int]
    p2p_seq: array[int]
    call: array[int]
    site: array[int]
    flags: array[int]  # state in the two low bits, then FLAG_RETIRED and FLAG_P2P
    created_ns: array[int]
    duration_ms: array[float]  # negative: not measured; empty: the whole dump has none

    def __len__(self) -> int:
        return len(self.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """All that one rank left: its dump, or in log-only mode its frontiers alone."""

    rank: int
    source: str  # the file (or "archive!member") it came from
    version: str = ""  # of the dump format; empty in log-only mode
    library: str = ""
    columns: Columns | None = None  # None: known by its frontiers only
    frontiers: Mapping[int, Frontier] = field(default_factory=dict)  # by index into Records.groups
    configured: frozenset[int] = frozenset()  # groups its file knows, used or not (Records.groups)
    first_record_id: int = 0  # above 0: the ring has wrapped, older calls are gone
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something about the input that its owner should know: a torn file, a duplicate, an epoch."""

    source: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What all ranks left. Same input, same value, whatever the order of files."""

    ranks: Mapping[int, RankRecord]
    groups: tuple[Group, ...]
    calls: tuple[Call, ...] = ()
    sites: tuple[Site, ...] = ()
    problems: tuple[Problem, ...] = ()
    quorum: int | None = None  # torchft: which quorum directory was read
    reread: Callable[[Records, int], Iterator[Entry]] | None = field(
        default=None, compare=False, repr=False
    )

    @property
    def expected_ranks(self) -> tuple[int, ...]:
        """Every rank that recorded something or is named as a member of a group."""
        named = {rank for group in self.groups for rank in group.ranks}
        return tuple(sorted(named | set(self.ranks)))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.expected_ranks if rank not in self.ranks)

    def entries(self, rank: int) -> Iterator[Entry]:
        """Yield the whole entries of one rank, oldest first, read again from its source."""
        if self.reread is None or self.ranks[rank].columns is None:
            return iter(())
        return self.reread(self, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a rank's process ended. A code below 0 or `signal` says it was killed."""

    rank: int
    code: int | None = None
    signal: str = ""
    at_s: float | None = None  # wall clock
    is_first_cause: bool = False  # it ended by itself, before others were stopped because of it
    error: str = ""  # last line of its traceback, if any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a rank's thread stood when it was asked (py-spy, faulthandler), innermost first."""

    rank: int
    frames: Site
    thread: str = "MainThread"


@dataclass(frozen=True, slots=True, kw_only=True)
class RasState:
    """What NCCL's RAS service said of one rank of one communicator."""

    rank: int
    communicator: str = ""
    members: tuple[int, ...] = ()
    is_missing: bool = False
    is_dead: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)  # operations so far, by name
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything known beside the records. All of it is optional."""

    exits: tuple[Exit, ...] = ()
    stacks: tuple[Stack, ...] = ()
    ras: tuple[RasState, ...] = ()
    notes: tuple[str, ...] = ()  # sentences to show with the verdict (the lighthouse's history)


class Verdict(StrEnum):
    HEALTHY = "healthy"
    FAULT = "fault"
    UNDECIDED = "undecided"


class Kind(StrEnum):
    """What a culprit did. The values are part of the JSON schema."""

    NEVER_ISSUED = "never_issued"
    DIED = "died"
    WRONG_OP = "wrong_op"
    SIZE_MISMATCH = "size_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    ROOT_MISMATCH = "root_mismatch"
    REDUCE_OP_MISMATCH = "reduce_op_mismatch"
    ORDER_INVERSION = "order_inversion"
    SKIPPED_CALL = "skipped_call"
    EXTRA_CALL = "extra_call"
    DEVICE_STALL = "device_stall"
    P2P_NO_PARTNER = "p2p_no_partner"
    UNEVEN_INPUTS = "uneven_inputs"
    STRAGGLER = "straggler"
    INIT_HANG = "init_hang"
    ONE_SIDED_TIMEOUT = "one_sided_timeout"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One rank that caused a fault, at which call, and the evidence, as sentences."""

    rank: int
    kind: Kind
    group: str
    group_ranks: tuple[int, ...] = ()
    seq: int | None = None
    op: str = ""
    where: str = ""  # source line of the call, or of the last thing it did
    confidence: float = 0.0
    because: tuple[str, ...] = ()
    stack: Site = ()
    is_hanging: bool = True  # False: nothing hung, but results are wrong or slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """One rank that only waits, for whom, and at which call."""

    rank: int
    waits_for: tuple[int, ...]
    group: str
    seq: int | None = None
    op: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact worth a sentence that names no culprit: a circle, a bad file, an ignored epoch."""

    code: str
    text: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer. Culprits come with the surest first; consequences and findings in rank order."""

    verdict: Verdict
    summary: str  # one sentence
    culprits: tuple[Culprit, ...] = ()
    consequences: tuple[Consequence, ...] = ()
    findings: tuple[Finding, ...] = ()
    lacking: tuple[str, ...] = ()  # what evidence would decide, when undecided
    next_steps: tuple[str, ...] = ()
    world_size: int = 0
    ranks_read: int = 0
    entries_read: int = 0

    def to_json(self) -> dict[str, object]:
        """The stable, documented form: plain dicts, lists, strings and numbers."""
        return {"schema": SCHEMA, **_plain(asdict(self))}


def _plain(value: dict[str, object]) -> dict[str, object]:
    return {key: _plain_value(item) for key, item in value.items()}


def _plain_value(value: object) -> object:
    if isinstance(value, dict):
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value.value if isinstance(value, StrEnum) else value
