"""The manager of one replica group: its ranks on one side, the lighthouse on the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ftcore.base.log import event
from ftcore.control.ballot import Ballot
from ftcore.control.member import Go, MemberCore
from ftcore.wire import ftcore_pb2 as pb
from ftcore.wire.codec import encode_hello, encode_report, quorum_to_pb
from ftcore.wire.frames import FrameProtocol
from ftcore.wire.messages import (
    Attached,
    Drain,
    Hello,
    LostMember,
    Member,
    NewQuorum,
    Notice,
    Order,
    Prepare,
    Refused,
    Want,
    show_id,
)

log = logging.getLogger("ftcore.daemon")

LAYOUT = "state layout"  # the one setting that may differ between the ranks of a group
GUARD_REMEDY = (
    "Check this group's hardware before you start it again, or load a checkpoint from before."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the trainer tells its manager when it starts it."""

    job: str
    replica_id: str
    incarnation: int
    ranks: int
    endpoints: tuple[str, ...]
    token: str
    stopped_limit_s: float = 2.0
    attach_timeout_s: float = 30.0
    failed_steps_max: int = 10
    hang_after_s: float = 30.0  # 0: a step may take for ever
    listen_host: str = ""


@dataclass(slots=True)
class Rank:
    """One rank as its manager sees it."""

    hello: pb.RankHello
    link: FrameProtocol
    push: FrameProtocol | None = None
    has_said_bye: bool = False


@dataclass(slots=True)
class Group:
    """Runs in one event loop. `ended` is set, with the last words, when this life is over."""

    config: Config
    poke: Callable[[], None] = lambda: None
    core: MemberCore | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)
    failed_steps: int = 0
    until: int = 0
    last_reason: str = ""
    condemned: int | None = None  # the process of a rank that hangs: it will not end by itself
    settings: dict[str, str] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    introduced: asyncio.Event = field(default_factory=asyncio.Event)
    _links: dict[FrameProtocol, int] = field(default_factory=dict)
    _ready: Ballot = field(init=False)
    _votes: Ballot = field(init=False)
    _healed: Ballot = field(init=False)
    _must_stop: bool = False
    _aborted: Go | None = None  # the running step, if it was aborted
    _must_recompute: bool = False

    def __post_init__(self) -> None:
        self._ready, self._votes, self._healed = (Ballot(self.config.ranks) for _ in range(3))

    # From the ranks

    def received(self, link: FrameProtocol, payload: bytes) -> None:
        message = pb.FromRank.FromString(payload)
        rank = self._links.get(link)
        match message.WhichOneof("kind"):
            case "hello":
                self._meet(link, message.hello)
            case _ if rank is None:
                link.close()
            case "ready":
                self._on_ready(rank, message.ready)
            case "vote":
                self._on_vote(rank, message.vote)
            case "heal_progress":
                self._on_heal_progress(rank, message.heal_progress)
            case "healed":
                self._on_healed(rank, message.healed)
            case "leave":
                self.drain(message.leave.reason)
            case "bye":
                self._on_bye(rank, message.bye)

    def closed(self, link: FrameProtocol) -> None:
        rank = self._links.pop(link, None)
        if rank is None or self.ended.is_set():
            return
        known = self.ranks.get(rank)
        if known is not None and not known.has_said_bye and link is known.link:
            self.end(f"rank {rank} (pid {known.hello.pid}) closed its connection")

    def _meet(self, link: FrameProtocol, hello: pb.RankHello) -> None:
        if hello.token != self.config.token:
            link.close()
            return
        self._links[link] = hello.rank
        if hello.is_push:
            self.ranks[hello.rank].push = link
        else:
            self.ranks[hello.rank] = Rank(hello=hello, link=link)
        link.send(pb.ToRank(welcome=pb.Welcome(ranks=self.config.ranks)).SerializeToString())
        if len(self.ranks) == self.config.ranks and all(r.push for r in self.ranks.values()):
            self._introduce()

    def _introduce(self) -> None:
        """All ranks are here: this group can say hello."""
        if self.core is not None:
            return
        hellos = [self.ranks[rank].hello for rank in range(self.config.ranks)]
        self.settings = dict(hellos[0].settings)
        for rank, hello in enumerate(hellos):
            theirs = dict(hello.settings)
            layout = theirs.pop(LAYOUT)
            if theirs != {k: v for k, v in self.settings.items() if k != LAYOUT}:
                self.stop(f"rank {rank} has other settings than rank 0", "Start all ranks alike.")
                return
            if rank > 0:
                self.settings[LAYOUT] += f" {layout}"
        member = Member(
            replica_id=self.config.replica_id,
            incarnation=self.config.incarnation,
            store_address=hellos[0].store_address,
            heal_addresses=tuple(hello.heal_address for hello in hellos),
        )
        first = hellos[0]
        self.core = MemberCore(
            member,
            committed=first.committed,
            lineage=first.lineage,
            lookahead=1 if self.config.ranks == 1 else 0,
        )
        self.core.until = self.until
        self.introduced.set()
        self._try_start()

    def _on_ready(self, rank: int, ready: pb.Ready) -> None:
        self._set_until(ready.until)
        self._ready.say(rank)
        self._try_start()

    def _on_vote(self, rank: int, vote: pb.Vote) -> None:
        core = self._running_core()
        self._set_until(vote.until)
        if core.running is not None:
            core.timed(group_s=vote.group_s, heal_s=vote.heal_s, held_s=vote.held_s)
        core.slowness = vote.slowness or core.slowness
        if vote.is_torn:
            core.state_torn()
        self._must_stop |= vote.must_stop
        self._must_recompute |= vote.must_recompute
        if not self._votes.say(rank, "" if vote.is_ok else vote.reason or "failed"):
            return
        reason = self._votes.reason
        self._votes.clear()
        self._healed.clear()
        lineage = core.lineage
        core.finish(is_committed=not reason, reason=reason)
        if self._must_stop:
            self.stop(reason, GUARD_REMEDY)
            return
        decision = pb.Decision(step=vote.step, is_committed=not reason, reason=reason)
        decision.must_recompute, self._must_recompute = self._must_recompute, False
        if reason:
            self._count_failure(reason)
        else:
            self.failed_steps = 0
            self._allow_next(core, decision)
        self._reply(pb.ToRank(decision=decision))
        if reason or core.want is Want.GONE or core.running is None or core.lineage != lineage:
            self.poke()
        self._end_if_dismissed()

    def _allow_next(self, core: MemberCore, decision: pb.Decision) -> None:
        """The ranks run the next step already, or may begin it now, or have to say Ready."""
        if core.running is not None:
            decision.may_run = core.running.may_run
            return
        go = core.try_start() if core.committed < self.until else None
        if go is not None:
            decision.go.CopyFrom(self._go(go))

    def _set_until(self, until: int) -> None:
        self.until = until
        if self.core is not None:  # a rank may be ready before another one has said hello
            self.core.until = until

    def _count_failure(self, reason: str) -> None:
        self.failed_steps += 1
        self.last_reason = reason
        event(log, "step.failed", step=self._running_core().committed, reason=reason)
        if self.failed_steps >= self.config.failed_steps_max:
            self.stop(
                f"{self.failed_steps} steps failed one after the other, the last because: {reason}",
                "Look at the first reason in the log. Raise failed_steps_max if the cause can "
                "pass by itself.",
            )

    def _on_heal_progress(self, rank: int, progress: pb.HealProgress) -> None:
        """It travels with the next heartbeat."""
        done, total = progress.bytes_done, progress.bytes_total
        self._running_core().heal_goes_on(rank, bytes_done=done, bytes_total=total)

    def _on_healed(self, rank: int, healed: pb.Healed) -> None:
        if self._healed.say(rank):
            self._running_core().heal_ended(healed.lineage)
            self.poke()

    def _on_bye(self, rank: int, bye: pb.Bye) -> None:
        self.ranks[rank].has_said_bye = True
        if all(r.has_said_bye for r in self.ranks.values()):
            self.end(bye.reason or "finished", is_clean=True)

    def rank_died(self, pid: int) -> None:
        for rank, known in self.ranks.items():
            if known.hello.pid == pid and not known.has_said_bye:
                self.end(f"rank {rank} (pid {pid}) died")
                return

    def rank_stopped(self, pid: int) -> None:
        for rank, known in self.ranks.items():
            if known.hello.pid == pid:
                limit_s = self.config.stopped_limit_s
                self.end(f"rank {rank} (pid {pid}) is stopped for more than {limit_s:g} s")
                return

    # For who watches for hangs

    @property
    def step(self) -> int:
        """The step that runs, or would be next."""
        core = self.core
        if core is None:
            return 0
        return core.running.step if core.running is not None else core.committed

    def late_in(self, attempt: tuple[int, int]) -> list[int]:
        """Ranks that have not voted on this attempt, if it was aborted; else nobody."""
        go = self._aborted
        if go is None or go is not self._running_core().running:
            return []
        is_it = (go.quorum.quorum_id, go.step) == attempt
        return self._votes.missing if is_it else []

    # From the lighthouse

    def order(self, order: Order) -> None:
        core = self.core
        if core is None or self.ended.is_set():
            return
        match order:
            case Prepare():
                if core.prepare(order):
                    self._abort("a step failed on another group")
            case NewQuorum(quorum=quorum):
                if core.new_quorum(quorum):
                    event(log, "quorum.taken", quorum=show_id(quorum.quorum_id))
            case LostMember():
                if core.lost_member(order):
                    self._abort(f"{order.replica_id} {order.reason}")
            case Drain(reason=reason):
                self.drain(reason)
            case Refused():
                self.stop(order.what, order.remedy, compare_with=order.compare_with)
            case Notice(text=text):
                self._push(pb.ToRank(notice=pb.Notice(text=text)))
            case Attached():
                return
        self.poke()
        self._try_start()
        self._end_if_dismissed()

    def drain(self, reason: str) -> None:
        """Leave in good order: the lighthouse names the step from which others go on alone."""
        if self.core is not None and self.core.want is not Want.GONE:
            self.core.leave(reason)
            self.poke()

    def stop(self, what: str, remedy: str, *, compare_with: str = "", clean: bool = False) -> None:
        """Tell all ranks why this group cannot go on, and end this life."""
        stop = pb.Stop(what=what, remedy=remedy, is_clean=clean, compare_with=compare_with)
        for rank in self.ranks.values():
            for link in (rank.link, rank.push):
                if link is not None:
                    link.send(pb.ToRank(stop=stop).SerializeToString())
        self.end(what, is_clean=True)

    def end(self, reason: str, *, is_clean: bool = False) -> None:
        """This life is over. Ranks that still live are told, unless they know."""
        if self.ended.is_set():
            return
        self.last_reason = reason
        event(log, "group.ended", reason=reason)
        if self.core is not None:
            self.core.die(reason)
        self.ended.set()
        if not is_clean:
            self.stop(f"this replica group lost a rank: {reason}", "Restart the replica group.")

    # Bytes for the lighthouse

    def hello_bytes(self) -> bytes:
        assert self.core is not None
        hello = Hello(
            job=self.config.job,
            report=self.core.report(),
            settings=self.settings,
            standing=self.core.standing,
        )
        return encode_hello(hello)

    def report_bytes(self) -> bytes:
        assert self.core is not None
        return encode_report(self.core.report())

    def news_bytes(self) -> bytes | None:
        assert self.core is not None
        news = self.core.news()
        return encode_report(news) if news is not None else None

    # Inside

    def _running_core(self) -> MemberCore:
        assert self.core is not None
        return self.core

    def _try_start(self) -> None:
        core = self.core
        if core is None or core.running is not None or not self._ready.is_complete:
            return
        if core.committed >= self.until and not self._heals_next():
            return
        go = core.try_start()
        self.poke()
        if go is not None:
            self._reply(pb.ToRank(go=self._go(go)))

    def _heals_next(self) -> bool:
        return bool(self._running_core().pending)

    def _go(self, go: Go) -> pb.Go:
        """Steps start only at a boundary of all ranks; in-place heals begin with this."""
        self._ready.clear()
        core = self._running_core()
        if go.must_heal and core.committed == 0:
            core.state_torn()
        quorum = quorum_to_pb(go.quorum)
        return pb.Go(step=go.step, quorum=quorum, must_heal=go.must_heal, may_run=go.may_run)

    def _abort(self, reason: str) -> None:
        running = self._running_core().running
        if running is not None:
            self._aborted = running
            abort = pb.Abort(quorum_id=running.quorum.quorum_id, reason=reason)
            self._push(pb.ToRank(abort=abort))

    def _reply(self, message: pb.ToRank) -> None:
        payload = message.SerializeToString()
        for rank in self.ranks.values():
            rank.link.send(payload)

    def _push(self, message: pb.ToRank) -> None:
        payload = message.SerializeToString()
        for rank in self.ranks.values():
            if rank.push is not None:
                rank.push.send(payload)

    def _end_if_dismissed(self) -> None:
        core = self._running_core()
        if core.want is Want.GONE and core.running is None and not self.ended.is_set():
            self.stop(f"drained: {core.reason}", "Nothing is to be done.", clean=True)
