"""Replica groups without tensors: the real manager core and the real stream, steps of a few ms."""

import asyncio
import itertools
from contextlib import asynccontextmanager

from ftcore.control.member import MemberCore
from ftcore.daemon.uplink import Uplink
from ftcore.wire.codec import encode_hello, encode_report
from ftcore.wire.messages import Drain, Hello, LostMember, Member, NewQuorum, Prepare, Refused

INCARNATIONS = itertools.count(1)


class Job:
    """Groups of one job that reduce with each other."""

    def __init__(self, endpoints, *, name="job", step_s=0.01):
        self.endpoints, self.name, self.step_s = endpoints, name, step_s
        self.groups, self._meetings = {}, {}
        self.may_heal = asyncio.Event()  # a heal has come to 30 % and waits while this is not set
        self.may_heal.set()

    def meeting(self, go):
        return self._meetings.setdefault((go.quorum.quorum_id, go.step), set())

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0.005)

    def all_in(self, *names):
        """Whether exactly these train under one quorum."""
        quorums = {
            self.groups[n].core.quorum and self.groups[n].core.quorum.quorum_id for n in names
        }
        quorum = self.groups[names[0]].core.quorum
        return (
            len(quorums) == 1 and quorum is not None and quorum.replica_ids == tuple(sorted(names))
        )

    async def steps(self, count):
        """Wait until every group has committed `count` more steps."""
        goals = {name: g.core.committed + count for name, g in self.groups.items()}
        await self.until(lambda: all(self.groups[n].core.committed >= c for n, c in goals.items()))


class Group:
    """One life of one replica group."""

    def __init__(self, job, name):
        self.job, self.name = job, name
        member = Member(replica_id=name, incarnation=next(INCARNATIONS), store_address=f"{name}:1")
        self.core = MemberCore(member)
        self.failed_steps, self.refused, self.attached_to = 0, None, 0
        self._wake, self._abort = asyncio.Event(), asyncio.Event()
        self.uplink = Uplink(
            job.endpoints,
            hello=self._hello,
            report=lambda: encode_report(self.core.report()),
            news=lambda: (news := self.core.news()) and encode_report(news),
            order=self._order,
        )

    def _hello(self):
        self.attached_to += 1
        hello = Hello(job=self.job.name, report=self.core.report(), standing=self.core.standing)
        return encode_hello(hello)

    def _order(self, order):
        core = self.core
        match order:
            case Prepare():
                must_abort = core.prepare(order)
            case NewQuorum(quorum=quorum):
                must_abort = core.new_quorum(quorum) and False
            case LostMember():
                must_abort = core.lost_member(order)
            case Drain(reason=reason):
                must_abort = core.leave(reason)
            case Refused():
                self.refused, must_abort = order, False
            case _:
                must_abort = False
        if must_abort:
            self._abort.set()
        self._wake.set()
        self.uplink.poke()

    async def train(self):
        while True:
            self._wake.clear()
            go = self.core.try_start()
            self.uplink.poke()
            if go is None:
                await self._wake.wait()
                continue
            if go.must_heal:
                self.core.state_torn()
                self.core.heal_goes_on(0, bytes_done=3 * 10**8, bytes_total=10**9)
                self.uplink.poke()
                await self.job.may_heal.wait()
                self.core.heal_ended(self._lineage_of_sources(go))
            self._abort.clear()
            is_committed = await self._reduce(go)
            self.failed_steps += not is_committed
            self.core.finish(is_committed=is_committed, reason="" if is_committed else "cut")
            self.uplink.poke()

    def _lineage_of_sources(self, go):
        sources = [m.replica_id for m in go.quorum.sources]
        return max((self.job.groups[s].core.lineage for s in sources), default=0)

    async def _reduce(self, go):
        """Meet all members of the quorum at this step, as a collective does."""
        meeting = self.job.meeting(go)
        meeting.add(self.name)
        self._wake_all()
        while meeting != set(go.quorum.replica_ids):
            if self._abort.is_set():
                return False
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.job.step_s)
        return True

    def _wake_all(self):
        for group in self.job.groups.values():
            group._wake.set()

    @asynccontextmanager
    async def alive(self):
        """Lives inside the `with`; leaving it is a sudden death."""
        tasks = [asyncio.create_task(self.uplink.run()), asyncio.create_task(self.train())]
        self.job.groups[self.name] = self
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.job.groups.get(self.name) is self:
                del self.job.groups[self.name]
