"""Decide for one replica group: which step may start, under which quorum, and what to report.

The manager process and the simulator drive it. It has no clock and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from ftcore.wire.messages import (
    LostMember,
    Member,
    Prepare,
    Quorum,
    Report,
    Want,
    term_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Run step `step` under `quorum`; first copy the state of its sources when `must_heal`.

    may_run: the ranks may begin steps up to this one by themselves, while their votes are on the
    way. It saves them the wait for an answer; a promise counts it as started.
    """

    step: int
    quorum: Quorum
    must_heal: bool
    may_run: int


class MemberCore:
    """One life of one replica group."""

    def __init__(
        self, member: Member, *, committed: int = 0, lineage: int = 0, lookahead: int = 0
    ) -> None:
        """`lookahead`: how many steps the ranks may be ahead of their votes; 0 for several ranks,
        because they wait for each other's votes."""
        self.member = member
        self.committed = committed
        self.lineage = lineage
        self.is_valid = True
        self.quorum: Quorum | None = None  # the one that steps run under
        self.pending: tuple[Quorum, ...] = ()  # later ones, by from_step
        self.running: Go | None = None
        self.want = Want.NOTHING
        self.reason = ""
        self.until: float = inf  # no step from this one on is to be run
        self._lookahead = lookahead
        self._may_run = -1
        self._number = 0
        self._reported: Report | None = None
        self._seen_id = 0  # the highest id ever seen: lower ones come from a deposed leader
        self._received_id = 0
        self._left_id = 0
        self._healed_id = 0
        self._failed_id = 0
        self._prepare: Prepare | None = None
        self._limit: float = inf
        self._is_broken = False  # a member of `quorum` is lost: it cannot finish another step
        self._timed_id, self._group_s, self._heal_s, self._held_s = 0, 0.0, 0.0, 0.0
        self._heal_bytes: dict[int, tuple[int, int]] = {}  # rank -> done and total of its heal
        self.slowness = 0.0  # as the ranks measure it, for the lighthouse to show

    # What the ranks do

    def try_start(self) -> Go | None:
        """All ranks stand at a step boundary. Return what to run, or None: not yet."""
        assert self.running is None
        self._switch()
        if self.quorum is None:
            if not self.pending and self.want is Want.NOTHING:
                self.want = Want.SEAT
            return None
        must_heal = self._must_heal(self.quorum)
        step = self.quorum.from_step if must_heal else self.committed
        if self._failed_id or self._is_broken or step > self._limit:
            return None
        self._may_run = -1
        return self._run(step, self.quorum, must_heal=must_heal)

    def _run(self, step: int, quorum: Quorum, *, must_heal: bool) -> Go:
        """Mark the step as running, and allow as many after it as may be."""
        self._may_run = max(self._may_run, step)
        while self._may_run < step + self._lookahead and self._may_start(self._may_run + 1):
            self._may_run += 1
        may_run = self._may_run
        self.running = Go(step=step, quorum=quorum, must_heal=must_heal, may_run=may_run)
        return self.running

    def _may_start(self, step: int) -> bool:
        """Whether the running quorum will still hold at `step`, for all that is known."""
        ends = min((q.from_step for q in self.pending), default=inf)
        return step <= self._limit and step < min(ends, self.until) and not self._is_broken

    def state_torn(self) -> None:
        """The state is a mixture, or not that of the others, until `heal_ended`."""
        self.is_valid = False

    def heal_goes_on(self, rank: int, *, bytes_done: int, bytes_total: int) -> None:
        """One rank says how much of its state has come."""
        if self.running is not None and self.running.must_heal:
            self._heal_bytes[rank] = bytes_done, bytes_total

    def heal_ended(self, lineage: int) -> None:
        """The state is that of the sources at the running step."""
        assert self.running is not None
        self.is_valid = True
        self._heal_bytes = {}
        self.committed = self.running.step
        self.lineage = lineage
        self._healed_id = self.running.quorum.quorum_id

    def timed(self, *, group_s: float, heal_s: float, held_s: float = 0.0) -> None:
        """A rank says how long entering the running quorum took. Only its first step counts."""
        assert self.running is not None
        quorum_id = self.running.quorum.quorum_id
        if self.lineage == quorum_id:
            return
        if self._timed_id != quorum_id:
            self._timed_id, self._group_s, self._heal_s, self._held_s = quorum_id, 0.0, 0.0, 0.0
        self._group_s, self._heal_s = max(self._group_s, group_s), max(self._heal_s, heal_s)
        self._held_s = max(self._held_s, held_s)

    def finish(self, *, is_committed: bool, reason: str = "") -> None:
        """The running step ended on all ranks. They may run the next one already: `running`."""
        assert self.running is not None
        quorum = self.running.quorum
        self.running, self._heal_bytes = None, {}
        if is_committed:
            assert self.is_valid and not self._must_heal(quorum)
            self.committed += 1
            self.lineage = quorum.quorum_id
            if self.committed <= self._may_run:  # the ranks run it already
                self._run(self.committed, quorum, must_heal=False)
        else:
            self._may_run = -1
            if self._is_dismissed():
                self.want = Want.GONE  # nobody repeats this step with it
                return
            self._failed_id, self.reason = quorum.quorum_id, reason
        if self._prepare is not None and self._prepare.is_broken:
            self._limit = self._promise_limit(self._prepare)

    def _is_dismissed(self) -> bool:
        """Whether it asked to leave, and the newest quorum goes on without it."""
        standing = self.standing
        is_out = standing is not None and self.member.life not in standing.lives
        return self.want is Want.LEAVE and is_out

    def leave(self, reason: str) -> None:
        """Drain: out at the next boundary that the lighthouse names; at once without a seat."""
        is_out = self.quorum is None and not self.pending and self.running is None
        self.want, self.reason = Want.GONE if is_out else Want.LEAVE, reason

    def die(self, reason: str) -> None:
        """A rank is gone, so this life of the group is over."""
        self.want, self.reason = Want.GONE, reason

    # What the lighthouse says

    def prepare(self, prepare: Prepare) -> bool:
        """Promise now when possible; when broken, once the running step has ended.

        Return whether the running step has to be aborted.
        """
        must_abort = prepare.must_abort and self.running is not None
        if prepare.change_id <= self._seen_id:
            return must_abort and prepare.change_id == self._seen_id
        self._seen_id = prepare.change_id
        self._prepare = prepare
        self._limit = self._promise_limit(prepare)
        return must_abort

    def _promise_limit(self, prepare: Prepare) -> int:
        """How far this group may go without the new quorum: one step beyond the last it started."""
        if prepare.is_broken:
            return self.committed - 1
        return int(min(self._limit, self._last_started() + 1))

    def _last_started(self) -> int:
        """The highest step index this group is bound to run under the quorums it has."""
        started = self.running.step if self.running else self.committed - 1
        heals = (q.from_step for q in self.pending if self._must_heal(q))
        return max([started, self._may_run, *heals])

    def new_quorum(self, quorum: Quorum) -> bool:
        """Take a quorum; return False when it is older than what was seen (a deposed leader)."""
        is_deposed = term_of(quorum.quorum_id) < term_of(self._seen_id)
        if is_deposed or quorum.quorum_id <= self._received_id:
            return False
        self._received_id = quorum.quorum_id
        self._seen_id = max(self._seen_id, quorum.quorum_id)
        if self._prepare is not None and self._prepare.change_id <= quorum.quorum_id:
            self._prepare = None
        if self._may_switch(quorum):
            self.pending = (quorum,)
        else:
            earlier = tuple(q for q in self.pending if q.from_step < quorum.from_step)
            self.pending = (*earlier, quorum)
        self._limit = inf  # a promise counts only together with the quorum that it was given under
        if self._prepare is not None:
            self._limit = self._promise_limit(self._prepare)
        if self.want is Want.SEAT and self.member.life in quorum.lives:
            self.want = Want.NOTHING
        if self.running is None:
            self._switch()
        return True

    def lost_member(self, lost: LostMember) -> bool:
        """Return whether the running step cannot end any more: abort its process group."""
        if self.member.life in lost.lives:
            return self._let_go(lost.quorum_id)
        if self.quorum is None or not lost.lives & self.quorum.lives:
            return False
        self._is_broken = True
        if self.running is None:
            self.reason = f"{lost.replica_id} {lost.reason}"
        return self.running is not None and self.running.quorum is self.quorum

    def report(self) -> Report:
        """All that the lighthouse needs to know: sent at least at every heartbeat."""
        self._number += 1
        self._reported = self._facts()
        return replace(self._reported, number=self._number)

    def news(self) -> Report | None:
        """The report, if it differs from the last one in more than the count of steps."""
        old = self._reported
        if old is not None:
            old = replace(old, committed=self.committed, lineage=self.lineage)
        return self.report() if self._facts() != old else None

    def _facts(self) -> Report:
        prepare, has_times = self._prepare, self.lineage == self._timed_id
        has_promised = prepare is not None and not (prepare.is_broken and self.running)
        return Report(
            member=self.member,
            number=0,
            quorum_id=self._received_id,
            left_id=self._left_id,
            committed=self.committed,
            is_valid=self.is_valid,
            lineage=self.lineage,
            promised=prepare.change_id if prepare and has_promised else 0,
            limit=int(self._limit) if self._limit < inf else 0,
            failed_id=self._stuck_id(),
            want=self.want,
            reason=self.reason,
            group_s=self._group_s if has_times else 0.0,
            heal_s=self._heal_s if has_times else 0.0,
            held_s=self._held_s if has_times else 0.0,
            heal_bytes_done=sum(done for done, _ in self._heal_bytes.values()),
            heal_bytes_total=sum(total for _, total in self._heal_bytes.values()),
            slowness=self.slowness,
        )

    def _stuck_id(self) -> int:
        """The quorum under which no further step can end. A lighthouse that took over does not know
        whom an earlier one has called lost, so this has to be said, step or no step."""
        if self._is_broken and self.running is None and self.quorum is not None:
            return self.quorum.quorum_id
        return self._failed_id

    @property
    def standing(self) -> Quorum | None:
        """The newest quorum this group is in: what a new lighthouse has to know."""
        return self.pending[-1] if self.pending else self.quorum

    @property
    def is_healing(self) -> bool:
        """The running step begins with a heal that has not ended."""
        return self.running is not None and self._must_heal(self.running.quorum)

    def _must_heal(self, quorum: Quorum) -> bool:
        is_named = self.member.life in quorum.lives and self.member.replica_id in quorum.healing
        return is_named and self._healed_id != quorum.quorum_id

    def _may_switch(self, quorum: Quorum) -> bool:
        """A healing member enters at once, the others when they have reached the boundary."""
        return self._must_heal(quorum) or quorum.from_step <= self.committed

    def _switch(self) -> None:
        """Enter every pending quorum whose time has come."""
        while self.pending and self._may_switch(self.pending[0]):
            quorum, *later = self.pending
            self.pending = tuple(later)
            self._failed_id, self._is_broken = 0, False
            if self.member.life in quorum.lives:
                self.quorum = quorum
            else:
                self.quorum = None
                self.want = Want.GONE if self.want is Want.LEAVE else Want.NOTHING

    def _let_go(self, quorum_id: int) -> bool:
        """This group was counted as lost: it will finish no step of that quorum."""
        if quorum_id < self._received_id:
            return False
        self._left_id = quorum_id
        self._received_id = max(self._received_id, quorum_id)  # a late NewQuorum of it is refused
        self.quorum, self.pending = None, ()
        self._prepare, self._limit = None, inf
        self._is_broken, self._failed_id = False, 0
        if self.want is Want.LEAVE:
            self.want = Want.GONE  # it is out already
        return self.running is not None
