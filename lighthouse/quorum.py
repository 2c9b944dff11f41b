"""Decide what the replica groups of one job should do next: wait, prepare, or take a quorum.

Everything here is a function of its arguments: no clock, no lock, no network. The server, the
simulator, the load test and a replay all call `decide`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from ftcore.wire.messages import Quorum, Report, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator chose.

    join_timeout_s: how long the first quorum waits for living groups that have not asked.
    heartbeat_timeout_s: silence after which a group counts as lost.
    reattach_timeout_s: how long a group whose stream closed may take to come back.
    learn_timeout_s: how long a new lighthouse waits for members of a quorum it did not issue. One
        that stopped without dying is noticed by different groups up to 2 s apart. Never less than
        heartbeat_timeout_s.
    promise_timeout_s: how long a living member may take to end its step when a quorum is broken.
    """

    replicas_min: int = 1
    replicas_max: int = 2**31
    join_timeout_s: float = 10.0
    heartbeat_timeout_s: float = 2.0
    reattach_timeout_s: float = 0.5
    learn_timeout_s: float = 0.0
    promise_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What is known of one living replica group."""

    report: Report
    heard_at: float
    asked_at: float = inf
    closed_at: float = inf

    @property
    def replica_id(self) -> str:
        return self.report.member.replica_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A Prepare that is on its way. `change_id` becomes the id of the new quorum."""

    change_id: int
    is_broken: bool
    must_abort: bool
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that the lighthouse knows of one job at one instant.

    seats: replica groups seen at present, by replica_id.
    lost: lives of the standing quorum that were announced as lost; `unsure` those among them that
        may still be training, unseen. last_id: the highest id ever used.
    learn_until: before that time groups of an earlier lighthouse may still come back.
    """

    seats: Mapping[str, Seat]
    standing: Quorum | None = None
    lost: frozenset[tuple[str, int]] = frozenset()
    unsure: frozenset[tuple[str, int]] = frozenset()
    change: Change | None = None
    last_id: int = 0
    learn_until: float = -inf
    init_sync: bool = True


class Hold(Enum):
    """What has to change before anything is done."""

    STANDING = "the quorum stands; nothing to change"
    LEARNING = "a lighthouse that just started waits for groups of its predecessor"
    TOO_FEW = "fewer participants than replicas_min"
    NO_MAJORITY = "participants are not a majority of the living replica groups"
    STRAGGLERS = "living replica groups have not asked yet"
    PROMISES = "members have not answered the Prepare yet"
    ORPHANS = "no member of the last quorum is here, and some may still be training"
    NO_STATE = "no participant has a whole state"
    STATE_AWAY = "no participant has the newest state, but others may"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing to do. Until the time `until`, only a message can change that."""

    hold: Hold
    until: float = inf
    whom: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartChange:
    """Send Prepare to the living members of the standing quorum."""

    is_broken: bool
    must_abort: bool = False
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Members that live but do not promise: count them as lost."""

    replica_ids: tuple[str, ...]


Decision = Waiting | StartChange | GiveUp | Quorum


def decide(view: View, policy: Policy, now: float) -> Decision:
    """Return what to do at `now`, or what is waited for."""
    members = living_members(view)
    if now < view.learn_until and (not members or _unseen(view, members)):
        return Waiting(hold=Hold.LEARNING, until=view.learn_until)
    if members:
        return _change(view, members, policy, now)
    if view.unsure:
        return Waiting(hold=Hold.ORPHANS, whom=tuple(sorted(r for r, _ in view.unsure)))
    return _first(view, policy, now)


def living_members(view: View) -> list[Seat]:
    """Seats of the standing quorum's members that are not lost, sorted by replica_id."""
    if view.standing is None:
        return []
    lives = view.standing.lives - view.lost
    seats = (view.seats.get(replica_id) for replica_id in view.standing.replica_ids)
    return [s for s in seats if s is not None and s.report.member.life in lives]


def _unseen(view: View, members: list[Seat]) -> bool:
    """Whether there are members of whom nothing is known since the lighthouse started."""
    assert view.standing is not None
    return len(members) < len(view.standing.lives - view.lost)


def _first(view: View, policy: Policy, now: float) -> Decision:
    """Nobody trains: let those who ask begin, once enough of them are there."""
    asking = _asking(view, without=())
    living = len(view.seats)
    if len(asking) < max(1, policy.replicas_min):
        return Waiting(hold=Hold.TOO_FEW, whom=_ids(asking))
    if 2 * len(asking) <= living:
        return Waiting(hold=Hold.NO_MAJORITY, whom=_ids(asking))
    deadline = min(s.asked_at for s in asking) + policy.join_timeout_s
    if len(asking) < min(living, policy.replicas_max) and now < deadline:
        missing = set(view.seats) - {s.replica_id for s in asking}
        return Waiting(hold=Hold.STRAGGLERS, until=deadline, whom=tuple(sorted(missing)))
    return _begin(view, asking[: policy.replicas_max])


def _change(view: View, members: list[Seat], policy: Policy, now: float) -> Decision:
    """Some members live: change their quorum only with the promise of every one of them."""
    wanted = _wanted_change(view, members, policy)
    change = view.change
    if change is None:
        return wanted or Waiting(hold=Hold.STANDING)
    if wanted is not None and (wanted.is_broken, wanted.must_abort) > (
        change.is_broken,
        change.must_abort,
    ):
        return wanted
    silent = [s for s in members if not _has_promised(s.report, view)]
    if silent:
        deadline = change.since + policy.promise_timeout_s
        if now < deadline:
            return Waiting(hold=Hold.PROMISES, until=deadline, whom=_ids(silent))
        return GiveUp(replica_ids=_ids(silent))
    stay = [s for s in members if s.report.want is not Want.LEAVE]
    joiners = _asking(view, without=_ids(members))
    if not stay and joiners:
        stay = members  # those who leave hold the only state: first let others copy it
    if not stay:
        from_step = 0 if change.is_broken else _boundary(members)
        return _quorum(view, [], [], from_step=from_step)
    joiners = joiners[: max(0, policy.replicas_max - len(stay))]
    if len(stay) + len(joiners) < policy.replicas_min:
        return Waiting(hold=Hold.TOO_FEW, whom=_ids([*stay, *joiners]))
    if change.is_broken:
        return _repair(view, stay=stay, joiners=joiners)
    return _extend(view, members, stay=stay, joiners=joiners)


def _has_promised(report: Report, view: View) -> bool:
    """A promise counts only from a member that knows the standing quorum."""
    assert view.standing is not None and view.change is not None
    knows = report.quorum_id >= view.standing.quorum_id
    return knows and report.promised == view.change.change_id


def _wanted_change(view: View, members: list[Seat], policy: Policy) -> StartChange | None:
    """Why the standing quorum should change, the strongest reason first."""
    standing = view.standing
    assert standing is not None
    for report in (s.report for s in members):
        if report.failed_id and report.quorum_id >= standing.quorum_id:
            reason = f"a step failed on {report.member.replica_id}: {report.reason}"
            return StartChange(is_broken=True, must_abort=True, reason=reason)
    if view.lost & standing.lives:
        return StartChange(is_broken=True, reason="a member is lost")
    if any(s.report.want is Want.LEAVE for s in members):
        return StartChange(is_broken=False, reason="a member leaves")
    joiners = _asking(view, without=_ids(members))
    if joiners and len(members) < policy.replicas_max:
        return StartChange(is_broken=False, reason=f"{joiners[0].replica_id} joins")
    if any(s.report.promised > standing.quorum_id for s in members):
        return StartChange(is_broken=False, reason="an earlier lighthouse left a change unfinished")
    return None


def _asking(view: View, *, without: Iterable[str]) -> list[Seat]:
    """Those who want a seat, sorted; not one that may still be training in the old quorum."""
    known = set(without)
    asking = (s for s in view.seats.values() if s.report.want is Want.SEAT)
    asking = (s for s in asking if s.report.member.life not in view.unsure)
    return sorted((s for s in asking if s.replica_id not in known), key=lambda s: s.replica_id)


def _ids(seats: Iterable[Seat]) -> tuple[str, ...]:
    return tuple(s.replica_id for s in seats)


def _begin(view: View, asking: list[Seat]) -> Decision:
    """The first quorum, or the first after all members are gone: start from the newest state."""
    whole = [s for s in asking if s.report.is_valid]
    if not whole:
        return Waiting(hold=Hold.NO_STATE, whom=_ids(asking))
    sources = _newest(whole)
    if sources[0].report.lineage == 0 and view.init_sync:
        sources = sources[:1]  # nothing says that initial weights are equal: make them so
    return _quorum(view, asking, sources, from_step=sources[0].report.committed)


def _repair(view: View, *, stay: list[Seat], joiners: list[Seat]) -> Decision:
    """After a loss or a failed step nobody runs: go on from the newest state of those who stay."""
    seats = [*stay, *joiners]
    whole = [s for s in stay if s.report.is_valid]
    if not whole:
        whole = [s for s in joiners if s.report.is_valid]
        if away := _with_newer_state(view, whole):
            return Waiting(hold=Hold.STATE_AWAY, whom=away)
    if not whole:
        return Waiting(hold=Hold.NO_STATE, whom=_ids(seats))
    sources = _newest(whole)
    return _quorum(view, seats, sources, from_step=sources[0].report.committed)


def _with_newer_state(view: View, whole: list[Seat]) -> tuple[str, ...]:
    """Who may have committed steps that none of `whole` has: out of sight, or not asking yet."""
    known = max((s.report.committed for s in whole), default=0)
    seats = view.seats.values()
    seen = {s.replica_id for s in seats if s.report.is_valid and s.report.committed > known}
    return tuple(sorted(seen | {replica_id for replica_id, _ in view.unsure}))


def _extend(view: View, members: list[Seat], *, stay: list[Seat], joiners: list[Seat]) -> Quorum:
    """Members go on running: switch at the first step that none of them can have started."""
    return _quorum(view, [*stay, *joiners], stay, from_step=_boundary(members))


def _boundary(members: list[Seat]) -> int:
    return 1 + max(s.report.limit for s in members)


def _newest(seats: list[Seat]) -> list[Seat]:
    def age(seat: Seat) -> tuple[int, int]:
        return seat.report.committed, seat.report.lineage

    newest = max(map(age, seats))
    return [s for s in seats if age(s) == newest]


def _quorum(view: View, seats: list[Seat], sources: list[Seat], *, from_step: int) -> Quorum:
    return Quorum(
        quorum_id=view.change.change_id if view.change else view.last_id + 1,
        from_step=from_step,
        members=tuple(sorted(s.report.member for s in seats)),
        healing=frozenset(_ids(seats)) - frozenset(_ids(sources)),
    )
