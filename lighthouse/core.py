"""One job of the lighthouse without its network: reports in, orders out, no clock of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from ftcore.wire.messages import (
    Drain,
    Hello,
    LostMember,
    Member,
    NewQuorum,
    Order,
    Prepare,
    Quorum,
    Refused,
    Report,
    Want,
)
from lighthouse.flaps import Deaths
from lighthouse.quorum import (
    Change,
    Decision,
    GiveUp,
    Policy,
    Seat,
    StartChange,
    View,
    Waiting,
    decide,
    living_members,
)
from lighthouse.refusal import refusal

Life = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What must be on durable storage before a quorum is announced."""

    job: str
    quorum: Quorum


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that happened, for logs, metrics and people."""

    at: float
    what: str
    about: str
    detail: str = ""
    quorum_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one message or one moment led to. Do `records` first, then send `orders`."""

    records: tuple[Record, ...] = ()
    orders: tuple[tuple[Life, Order], ...] = ()
    facts: tuple[Fact, ...] = ()
    wake_at: float = inf
    decision: Decision | None = None


class JobCore:
    """Remembers who was heard and what was promised. The server and the simulator both drive it."""

    def __init__(
        self,
        job: str,
        policy: Policy,
        *,
        first_id: int,
        now: float,
        recorded: Quorum | None = None,
        must_learn: bool = True,
    ) -> None:
        """`first_id - 1` bounds the ids of every earlier term. `must_learn` unless a complete
        journal says that there was no quorum before."""
        self.job = job
        self.policy = policy
        self.defers = False  # True: what arrives is noted, and decided when `poll` is called
        self.standing = recorded
        self.last_id = max(first_id - 1, recorded.quorum_id if recorded else 0)
        self.seats: dict[str, Seat] = {}
        self._lost: dict[Life, bool] = {}  # life -> may still be training
        self._dismissed: frozenset[Life] = frozenset()  # left the standing quorum in good order
        self._change: Change | None = None
        self._settings: dict[str, str] = {}
        self._rivals: dict[str, Hello] = {}
        self._left_at: dict[Life, int] = {}  # steps that the last one to go had committed
        self._buried: dict[str, int] = {}  # replica_id -> incarnation that said it is gone
        self._drains: dict[str, str] = {}
        self.deaths = Deaths()
        self.last_words: dict[str, tuple[float, str]] = {}  # of groups that went
        learn_s = max(policy.learn_timeout_s, policy.heartbeat_timeout_s)
        self._learn_until = now + learn_s if must_learn else -inf
        self._wake_at = -inf  # before this time, silence cannot matter
        self._orders: list[tuple[Life, Order]] = []
        self._records: list[Record] = []
        self._facts: list[Fact] = []

    def hello(self, hello: Hello, now: float) -> Turn:
        """A stream of this group opened (again)."""
        member = hello.report.member
        others = [s.report.member for r, s in self.seats.items() if r != member.replica_id]
        refused = refusal(self._settings, hello.settings, others)
        if refused is not None:
            self._order(member.life, refused)
            return self._take(None, now)
        seat = self.seats.get(member.replica_id)
        if seat and seat.report.member.incarnation != member.incarnation and seat.closed_at == inf:
            self._rivals[member.replica_id] = hello  # whoever is heard next is the living one
            return self._settle(now)
        self._settings = dict(hello.settings)
        self._learn(hello.standing)
        return self._sit(hello.report, now)

    def report(self, report: Report, now: float) -> Turn:
        """Everything a group knows; older ones than the newest are ignored."""
        replica_id = report.member.replica_id
        if self._buried.get(replica_id) == report.member.incarnation:
            return self._settle(now)
        rival = self._rivals.get(replica_id)
        if rival and rival.report.member.life == report.member.life:
            self._rivals[replica_id] = replace(rival, report=report)
            return self._settle(now)
        seat = self.seats.get(replica_id)
        if seat is None:
            return self._sit(report, now)  # silent for so long that it had lost its seat
        if seat.report.member.incarnation != report.member.incarnation:
            self._refuse_rival(report.member)
            return self._settle(now)
        if rival and report.want is not Want.GONE:
            self._refuse_rival(self._rivals.pop(replica_id).report.member)
        if report.number < seat.report.number:
            return self._settle(now)
        if now < self._wake_at and self._says_nothing_new(seat, report):
            self.seats[replica_id] = replace(seat, report=report, heard_at=now)
            return Turn(wake_at=self._wake_at)
        return self._sit(report, now)

    def _says_nothing_new(self, seat: Seat, report: Report) -> bool:
        """A heartbeat of a group that trains: it must cost almost nothing."""
        standing = self.standing
        if self._change is not None or standing is None or seat.closed_at < inf:
            return False
        if report.quorum_id != standing.quorum_id or report.member.life in self._lost:
            return False
        old = seat.report
        return report == replace(
            old, number=report.number, committed=report.committed, lineage=report.lineage
        )

    def closed(self, life: Life, now: float) -> Turn:
        """The stream of this group broke. It has `reattach_timeout_s` to come back."""
        seat = self.seats.get(life[0])
        rival = self._rivals.get(life[0])
        if rival and rival.report.member.life == life:
            del self._rivals[life[0]]
        if seat and seat.report.member.life == life:
            self.seats[life[0]] = replace(seat, closed_at=now)
        return self._settle(now)

    def drain(self, replica_id: str, reason: str, now: float) -> Turn:
        """An operator wants this group out in good order."""
        self._drains[replica_id] = reason
        if replica_id in self.seats:
            self._order(self.seats[replica_id].report.member.life, Drain(reason=reason))
        return self.poll(now)

    def evict(self, replica_id: str, reason: str, now: float) -> Turn:
        """An operator knows that this group is dead, or wants it treated so."""
        if self.standing:
            for member in self.standing.members:
                if member.replica_id == replica_id:
                    self._lose(member.life, f"evicted: {reason}", now, unsure=False)
        self.seats.pop(replica_id, None)
        return self.poll(now)

    # What follows

    def poll(self, now: float) -> Turn:
        """Decide until nothing more is to be done at this moment."""
        self._drop_silent(now)
        while True:
            decision = decide(self.view(), self.policy, now)
            match decision:
                case Waiting():
                    return self._take(decision, now)
                case StartChange():
                    self._start_change(decision, now)
                case GiveUp(replica_ids=replica_ids):
                    for replica_id in replica_ids:
                        life = self.seats[replica_id].report.member.life
                        self._lose(life, "does not answer a Prepare", now, unsure=True)
                case Quorum():
                    self._issue(decision, now)

    def _settle(self, now: float) -> Turn:
        """Decide, or leave it to the next `poll` so that many messages cost one decision."""
        if not self.defers:
            return self.poll(now)
        turn = Turn(orders=tuple(self._orders), facts=tuple(self._facts), wake_at=now)
        self._orders, self._facts = [], []
        return turn

    def view(self) -> View:
        return View(
            seats=self.seats,
            standing=self.standing,
            lost=frozenset(self._lost),
            unsure=frozenset(life for life, unsure in self._lost.items() if unsure),
            change=self._change,
            last_id=self.last_id,
            learn_until=self._learn_until,
            held=self.deaths.held(self.policy),
        )

    def _sit(self, report: Report, now: float) -> Turn:
        """Take note of a report and send what it shows to be missing."""
        member = report.member
        before = self.seats.get(member.replica_id)
        if before and before.report.member.life != member.life:
            self._lose(before.report.member.life, "was restarted", now, unsure=False)
            before = None
        # The lineage of a state from a checkpoint may be all that is left of a lost lighthouse.
        self.last_id = max(self.last_id, report.quorum_id, report.promised, report.lineage)
        self._forget_older_lives(report, now)
        if report.want is Want.GONE:
            if self.seats.pop(member.replica_id, None) is None:
                self._note(now, "group.gone", member.replica_id, report.reason)
            self.last_words[member.replica_id] = (now, report.reason)
            self._buried[member.replica_id] = member.incarnation
            self._left_at = {member.life: report.committed}
            self._lose(member.life, report.reason, now, unsure=False)
            self._promote_rival(member.replica_id, now)
            return self._settle(now)
        self.last_words.pop(member.replica_id, None)
        asked_before = before is not None and before.report.want is Want.SEAT
        asked_at = before.asked_at if before and asked_before else now
        self.seats[member.replica_id] = Seat(
            report=report, heard_at=now, asked_at=asked_at if report.want is Want.SEAT else inf
        )
        self._remind(report)
        return self._settle(now)

    def _forget_older_lives(self, report: Report, now: float) -> None:
        """A new life, or a group that let go of the quorum, proves that no old one trains."""
        if self.standing is None:
            return
        member, standing = report.member, self.standing
        for old in standing.members:
            if old.replica_id != member.replica_id:
                continue
            if old.incarnation != member.incarnation:
                self._lose(old.life, "was restarted", now, unsure=False)
            elif report.left_id >= standing.quorum_id:
                self._lose(old.life, "let go of the quorum", now, unsure=False)

    def _remind(self, report: Report) -> None:
        """Repeat the orders that this report shows to be missing."""
        member, standing, change = report.member, self.standing, self._change
        if standing is None:
            return
        is_member = member.life in standing.lives
        if not is_member and member.life in self._dismissed:
            if report.quorum_id < standing.quorum_id:
                self._order(member.life, NewQuorum(quorum=standing))
            return
        if not is_member and report.quorum_id > report.left_id:
            self._order(member.life, self._lost_order(member.life, "the quorum went on without it"))
            return
        if member.life in self._lost:
            if report.left_id < standing.quorum_id:
                self._order(member.life, self._lost_order(member.life, "was lost"))
            return
        if is_member and report.quorum_id < standing.quorum_id:
            self._order(member.life, NewQuorum(quorum=standing))
        if is_member and change and report.promised != change.change_id:
            self._order(member.life, _prepare(change))

    def _learn(self, standing: Quorum | None) -> None:
        """Adopt a quorum that an earlier lighthouse issued and this one does not know."""
        if standing is None or standing.quorum_id <= (
            self.standing.quorum_id if self.standing else 0
        ):
            return
        self.standing = standing
        self.last_id = max(self.last_id, standing.quorum_id)
        self._lost.clear()

    def _drop_silent(self, now: float) -> None:
        """Seats not heard for too long are lost; so are members that nobody has seen."""
        members = living_members(self.view())
        is_failing = any(s.report.failed_id for s in members)
        for seat in list(self.seats.values()):
            reason = self._silence(seat, now, is_failing)
            if reason:
                del self.seats[seat.replica_id]
                self._lose(seat.report.member.life, reason, now, unsure=True)
                self._promote_rival(seat.replica_id, now)
        if self.standing and now >= self._learn_until:
            for member in self.standing.members:
                if member.life not in self._lost and member.replica_id not in self.seats:
                    self._lose(member.life, "was never seen again", now, unsure=True)

    def _silence(self, seat: Seat, now: float, is_failing: bool) -> str:
        if now >= seat.heard_at + self.policy.heartbeat_timeout_s:
            return f"was silent for {now - seat.heard_at:.1f} s"
        if now >= seat.closed_at + self.policy.reattach_timeout_s:
            return "closed its stream and did not come back"
        if is_failing and seat.closed_at < inf:
            return "closed its stream while a step failed"
        return ""

    def _promote_rival(self, replica_id: str, now: float) -> None:
        rival = self._rivals.pop(replica_id, None)
        if rival:
            report = rival.report
            self._settings = dict(rival.settings)
            asked_at = now if report.want is Want.SEAT else inf
            self.seats[replica_id] = Seat(report=report, heard_at=now, asked_at=asked_at)
            for life in [life for life in self._lost if life[0] == replica_id]:
                self._lost[life] = False

    def _refuse_rival(self, member: Member) -> None:
        what = f"replica_id {member.replica_id!r} is in use by another living group of this job"
        remedy = "Give each replica group its own replica_id."
        self._order(member.life, Refused(what=what, remedy=remedy))

    def _lose(self, life: Life, reason: str, now: float, *, unsure: bool) -> None:
        """Count a member as lost and tell all others; `unsure` when it may still be training."""
        if self.standing is None:
            return
        if life in self._dismissed:
            self._dismissed -= {life}
            if not self._has_passed(life):  # it is needed for steps before the boundary
                self._announce_lost(life, reason)
        if life not in self.standing.lives:
            return
        if life not in self._lost:
            self._note(now, "member.lost", life[0], reason)
            self.deaths.note(life[0], self.policy, now)
            self._announce_lost(life, reason)
        self._lost[life] = unsure and self._lost.get(life, True)

    def _has_passed(self, life: Life) -> bool:
        """Whether a dismissed member has committed all steps that it was still needed for."""
        assert self.standing is not None
        return self._left_at.get(life, -1) >= self.standing.from_step

    def _announce_lost(self, life: Life, reason: str) -> None:
        order = self._lost_order(life, reason)
        told = {s.report.member.life for s in living_members(self.view())} | {life}
        self._orders.extend((to, order) for to in sorted(told))

    def _lost_order(self, life: Life, reason: str) -> LostMember:
        assert self.standing is not None
        return LostMember(
            quorum_id=self.standing.quorum_id,
            replica_id=life[0],
            incarnation=life[1],
            reason=reason,
        )

    def _start_change(self, start: StartChange, now: float) -> None:
        self.last_id += 1
        self._change = Change(
            change_id=self.last_id,
            is_broken=start.is_broken,
            must_abort=start.must_abort,
            since=now,
        )
        self._note(now, "change.started", "quorum", start.reason)
        for seat in living_members(self.view()):
            self._order(seat.report.member.life, _prepare(self._change))

    def _issue(self, quorum: Quorum, now: float) -> None:
        before = {s.report.member.life for s in living_members(self.view())}
        self._records.append(Record(job=self.job, quorum=quorum))
        self.standing, self._change, self._lost = quorum, None, {}
        seated = {s.report.member.life for s in self.seats.values()}
        self._dismissed = frozenset((before | self._dismissed & seated) - quorum.lives)
        self.last_id = quorum.quorum_id
        self._note(now, "quorum.issued", "quorum", ", ".join(quorum.replica_ids))
        order = NewQuorum(quorum=quorum)
        self._orders.extend((life, order) for life in sorted(before | quorum.lives))
        for replica_id in quorum.replica_ids:
            seat = self.seats[replica_id]
            report = replace(seat.report, want=_after_seating(seat.report.want))
            self.seats[replica_id] = replace(seat, report=report, asked_at=inf)

    def _note(self, at: float, what: str, about: str, detail: str) -> None:
        quorum_id = self.standing.quorum_id if self.standing else 0
        self._facts.append(Fact(at=at, what=what, about=about, detail=detail, quorum_id=quorum_id))

    def _order(self, life: Life, order: Order) -> None:
        self._orders.append((life, order))

    def _take(self, decision: Decision | None, now: float) -> Turn:
        until = decision.until if isinstance(decision, Waiting) else inf
        self._wake_at = min([until, *self._expiries(now)])
        turn = Turn(
            records=tuple(self._records),
            orders=tuple(self._orders),
            facts=tuple(self._facts),
            wake_at=self._wake_at,
            decision=decision,
        )
        self._records, self._orders, self._facts = [], [], []
        return turn

    def _expiries(self, now: float) -> Iterable[float]:
        for seat in self.seats.values():
            yield seat.heard_at + self.policy.heartbeat_timeout_s
            yield seat.closed_at + self.policy.reattach_timeout_s
        if self._learn_until > now:
            yield self._learn_until
        yield from (u for u in self.deaths.held(self.policy).values() if u > now)


def _prepare(change: Change) -> Prepare:
    return Prepare(
        change_id=change.change_id, is_broken=change.is_broken, must_abort=change.must_abort
    )


def _after_seating(want: Want) -> Want:
    """A seat was given: it is asked for no longer."""
    return Want.NOTHING if want is Want.SEAT else want
