"""What managers and the lighthouse say to each other, as frozen values.

A manager always says all it knows about its group in one `Report`, again and again; the lighthouse
answers with the orders that this report shows to be missing. So a lost, repeated or late message
costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

TERM_BITS = 32


def quorum_id_of(term: int, number: int) -> int:
    """Ids of a later lighthouse term are greater than all ids of an earlier one."""
    return term << TERM_BITS | number


def term_of(quorum_id: int) -> int:
    return quorum_id >> TERM_BITS


def show_id(quorum_id: int) -> str:
    """`3.7`: the seventh id of the third term."""
    return f"{term_of(quorum_id)}.{quorum_id & ((1 << TERM_BITS) - 1)}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Member:
    """One life of a replica group, and where its ranks can be reached.

    `heal_addresses` holds `host:port` of the heal server of each group rank, `store_address` that
    of the group's key-value store for process-group set-up.
    """

    replica_id: str
    incarnation: int
    store_address: str = ""
    heal_addresses: tuple[str, ...] = ()

    @property
    def life(self) -> tuple[str, int]:
        return self.replica_id, self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The replica groups that take the steps from `from_step` on together.

    `members` is sorted by replica_id; a member's place in it is its replica rank. Members named in
    `healing` copy the state at `from_step` from all others before they take part in that step.
    Members named in `spares` follow without shards, to take over.
    """

    quorum_id: int
    from_step: int
    members: tuple[Member, ...]
    healing: frozenset[str] = frozenset()
    spares: frozenset[str] = frozenset()
    _lives: frozenset[tuple[str, int]] = field(init=False, repr=False, compare=False)
    _by_name: Mapping[str, Member] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Looked at for each report of each member, so made once."""
        object.__setattr__(self, "_lives", frozenset(m.life for m in self.members))
        object.__setattr__(self, "_by_name", {m.replica_id: m for m in self.members})

    @property
    def replica_ids(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self.members)

    @property
    def lives(self) -> frozenset[tuple[str, int]]:
        return self._lives

    def member(self, replica_id: str) -> Member | None:
        return self._by_name.get(replica_id)

    @property
    def sources(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.replica_id not in self.healing)


class Want(Enum):
    """What a replica group asks of the lighthouse."""

    NOTHING = 0
    SEAT = 1  # waits at a step boundary for a quorum to be in
    LEAVE = 2  # draining: out at the next boundary, in good order
    GONE = 3  # dead or leaving now; nobody will use this incarnation again


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the lighthouse needs to know about one replica group, at one moment.

    committed: steps this group has committed, so also the index of its next step.
    is_valid: its state is that of `committed`, not half of a heal.
    lineage: the quorum under which it committed its last step (0: none yet). Groups with equal
        `committed` and `lineage` hold the same state.
    limit: the highest step index it may start before it has a new quorum. Means something only
        together with `promised`, the id of the Prepare it answers.
    quorum_id: the newest quorum it has received. left_id: the newest quorum that it has let go of
        after it was counted as lost: it will not finish a step of that quorum.
    failed_id: the quorum under which its last step failed, or 0.
    group_s, heal_s: how long the slowest rank took, before its first step under its quorum, to
        build process groups and to copy the state. held_s: how long the heals of others held it.
    heal_bytes_done, heal_bytes_total: how far the heal is that runs now, over all ranks; else 0.
    slowness: how many times slower than the others it does its own work; 0 where not known.
    """

    member: Member
    number: int
    quorum_id: int = 0
    left_id: int = 0
    committed: int = 0
    is_valid: bool = True
    lineage: int = 0
    promised: int = 0
    limit: int = 0
    failed_id: int = 0
    want: Want = Want.NOTHING
    reason: str = ""
    group_s: float = 0.0
    heal_s: float = 0.0
    held_s: float = 0.0
    heal_bytes_done: int = 0
    heal_bytes_total: int = 0
    slowness: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a stream: who this is, and what must agree between the groups.

    settings: names and values that have to be the same in all groups of the job (version, seed,
        shards, mode, ranks, layout hash).
    standing: the quorum this group is in, so that a new lighthouse leader learns it.
    """

    job: str
    report: Report
    settings: Mapping[str, str] = field(default_factory=dict)
    standing: Quorum | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The stream is accepted. Reports are expected at least every `report_every_s` seconds."""

    report_every_s: float
    replicas_min: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """A new quorum is coming: promise how far you may go without it.

    When `is_broken`, the standing quorum cannot go on: end the running step one way or the other,
    promise what is committed, start nothing. `must_abort`: a member's step failed, so nobody can
    count on its part of a reduction any more.
    """

    change_id: int
    is_broken: bool
    must_abort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewQuorum:
    quorum: Quorum


@dataclass(frozen=True, slots=True, kw_only=True)
class LostMember:
    """Who will not finish a step of quorum `quorum_id` any more, with `others` lost at the same
    moment. When it is the receiver, it is out of the quorum and asks for a new seat."""

    quorum_id: int
    replica_id: str
    incarnation: int
    reason: str
    others: tuple[tuple[str, int], ...] = ()

    @property
    def lives(self) -> frozenset[tuple[str, int]]:
        return frozenset({(self.replica_id, self.incarnation), *self.others})


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Finish the step, leave in good order, exit."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """This group cannot take part; trying again will not help before `remedy` is done.

    `compare_with` is the heal address of a group with the right layout, when layouts differ.
    """

    what: str
    remedy: str
    compare_with: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """For people: what the lighthouse is waiting for."""

    text: str


Order = Attached | Prepare | NewQuorum | LostMember | Drain | Refused | Notice
