"""The lighthouse process: streams in, the pure core in the middle, records and streams out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from math import inf

from ftcore.base.errors import FtError
from ftcore.base.log import event
from ftcore.wire.codec import decode_from_group, encode_order
from ftcore.wire.errors import BadMessage
from ftcore.wire.messages import (
    Attached,
    Hello,
    Member,
    Quorum,
    Refused,
    Report,
    quorum_id_of,
    show_id,
)
from lighthouse.core import Fact, JobCore, Life, Turn
from lighthouse.errors import StreamRefused
from lighthouse.goodput import Goodput, Interruption, sentence, summary
from lighthouse.quorum import Decision, Policy
from lighthouse.records import Records
from lighthouse.status import JsonDict, job_status
from lighthouse.trace import trace_interruption

log = logging.getLogger("lighthouse")

FACTS_MAX = 1000
OUTBOX_MAX = 256
JOBS_MAX = 1000
GROUPS_MAX = 20_000

Clock = Callable[[], float]


class Outbox:
    """Orders on their way to one group. A reader that is too slow is cut off, not buffered."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(OUTBOX_MAX)

    def put(self, data: bytes) -> None:
        try:
            self.queue.put_nowait(data)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        while self.queue.full():
            self.queue.get_nowait()
        self.queue.put_nowait(None)


class Job:
    """One job: its core, its streams and its timer."""

    def __init__(self, core: JobCore, records: Records, clock: Clock) -> None:
        self.core = core
        self.decision: Decision | None = None
        self.facts: deque[Fact] = deque(maxlen=FACTS_MAX)
        self.counts: dict[str, int] = {}
        self.book = Goodput()
        self._timeline: deque[JsonDict] = deque(maxlen=FACTS_MAX)
        self._heard_at: dict[str, float] = {}
        self._records = records
        self._clock = clock
        self._outboxes: dict[Life, Outbox] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._rests_until = 0.0
        self._turns: asyncio.Queue[Turn] = asyncio.Queue()
        self._performer = asyncio.create_task(self._perform_turns())

    def attach(self, hello: Hello, outbox: Outbox) -> None:
        life = hello.report.member.life
        if old := self._outboxes.pop(life, None):
            old.close()
        self._outboxes[life] = outbox
        every_s = self.core.policy.heartbeat_timeout_s / 4
        outbox.put(encode_order(Attached(report_every_s=every_s)))
        now = self._clock()
        self._heard_at[life[0]] = now
        self.book.hello(hello.report, hello.standing, now)
        self.take(self.core.hello(hello, now))

    def detach(self, life: Life, outbox: Outbox) -> None:
        if self._outboxes.get(life) is outbox:
            del self._outboxes[life]
            self._heard_at[life[0]] = now = self._clock()
            self.take(self.core.closed(life, now))

    def take(self, turn: Turn) -> None:
        """Carry out a turn: at once if nothing has to be durable first, else in its order."""
        if turn.decision is not None:
            self.decision = turn.decision
        for fact in turn.facts:
            self._note(fact)
        self._set_timer(turn.wake_at)
        if turn.records or not self._turns.empty():
            self._turns.put_nowait(turn)
        else:
            self._send(turn)

    async def _perform_turns(self) -> None:
        while True:
            turn = await self._turns.get()
            for record in turn.records:
                await self._records.write(record)
            self._send(turn)

    def _send(self, turn: Turn) -> None:
        if not self._records.may_speak():
            return
        encoded: dict[int, bytes] = {}  # one member list for all, serialized once
        for life, order in turn.orders:
            outbox = self._outboxes.get(life)
            if outbox is not None:
                if id(order) not in encoded:
                    encoded[id(order)] = encode_order(order)
                outbox.put(encoded[id(order)])
                if isinstance(order, Refused):
                    outbox.close()

    def _set_timer(self, wake_at: float) -> None:
        """Keeps an earlier timer: it asks again. Messages that come together are decided together,
        and deciding takes a third of the time at most: at 1,024 groups it takes 2 ms each time."""
        if wake_at == inf or (self._timer is not None and self._timer_at <= wake_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wake_at
        delay_s = max(wake_at, self._rests_until) - self._clock()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._wake)

    def _wake(self) -> None:
        self._timer = None
        started = self._clock()
        turn = self.core.poll(started)
        ended = self._clock()
        self._rests_until = ended + 2 * (ended - started)
        self.take(turn)

    def _note(self, fact: Fact) -> None:
        self.facts.append(fact)
        self.counts[fact.what] = self.counts.get(fact.what, 0) + 1
        quorum = show_id(fact.quorum_id)
        event(log, fact.what, job=self.core.job, quorum=quorum, who=fact.about, why=fact.detail)

        self._timeline.append(
            {
                "time": round(time.time(), 3),
                "what": fact.what,
                "about": fact.about,
                "detail": fact.detail,
                "quorum": quorum,
            }
        )
        ended = self.book.told(fact, self.core.standing, self._heard_at.get(fact.about))
        if ended is not None:
            self._note_interruption(ended)

    def history(self) -> list[JsonDict]:
        """What happened, oldest first, by the wall clock."""
        return list(self._timeline)

    def interruptions(self) -> list[JsonDict]:
        """Each time that training stopped and what it cost, oldest first, by the wall clock."""
        return [*self._records.noted(self.core.job), *map(self._shown, self.book.records)]

    def _shown(self, record: Interruption) -> JsonDict:
        return record.to_json(wall_offset_s=time.time() - self._clock())

    def _note_interruption(self, record: Interruption) -> None:
        self._records.note(self.core.job, self._shown(record))
        offset_s = time.time() - self._clock()
        trace_interruption(record, job=self.core.job, wall_offset_s=offset_s)
        what = Fact(
            at=self._clock(),
            what="interruption.ended",
            about=", ".join(record.who) or "the job",
            detail=sentence(record),
            quorum_id=record.quorum_id,
        )
        self._note(what)

    def heard(self, report: Report) -> None:
        """A report came in."""
        now = self._clock()
        self._heard_at[report.member.replica_id] = now
        if (ended := self.book.heard(report, now)) is not None:
            self._note_interruption(ended)
        self.take(self.core.report(report, now))

    def knows(self, replica_id: str) -> bool:
        standing = self.core.standing
        return replica_id in self.core.seats or (
            standing is not None and replica_id in standing.replica_ids
        )

    def drain(self, replica_id: str, reason: str) -> None:
        self.take(self.core.drain(replica_id, reason, self._clock()))

    def evict(self, replica_id: str, reason: str) -> None:
        self.take(self.core.evict(replica_id, reason, self._clock()))

    def close(self) -> None:
        self._performer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for outbox in self._outboxes.values():
            outbox.close()

    @property
    def performer(self) -> asyncio.Task[None]:
        return self._performer


class Lighthouse:
    """All jobs of one lighthouse that leads."""

    def __init__(
        self, policy: Policy, records: Records, *, clock: Clock, jobs_max: int = JOBS_MAX
    ) -> None:
        self.policy = policy
        self.records = records
        self.jobs: dict[str, Job] = {}
        self.failed: asyncio.Future[FtError] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._jobs_max = jobs_max
        for name, quorum in records.newest().items():
            self._open(name, quorum)

    def job(self, name: str) -> Job:
        if name in self.jobs:
            return self.jobs[name]
        if len(self.jobs) >= self._jobs_max:
            raise StreamRefused(f"this lighthouse already serves {self._jobs_max} jobs")
        return self._open(name, None)

    def _open(self, name: str, recorded: Quorum | None) -> Job:
        core = JobCore(
            name,
            self.policy,
            first_id=quorum_id_of(self.records.term, 1),
            now=self._clock(),
            recorded=recorded,
            must_learn=recorded is not None or not self.records.is_complete,
        )
        core.defers = True
        job = self.jobs[name] = Job(core, self.records, self._clock)
        job.performer.add_done_callback(self._performer_ended)
        return job

    def _performer_ended(self, task: asyncio.Task[None]) -> None:
        """Nothing more can be made durable: this lighthouse must not speak any longer."""
        if (
            not task.cancelled()
            and isinstance(task.exception(), FtError)
            and not self.failed.done()
        ):
            self.failed.set_result(task.exception())  # type: ignore[arg-type]

    async def serve_stream(
        self,
        read: AsyncIterator[bytes],
        write: Callable[[bytes], Awaitable[None]],
        *,
        admit: Callable[[str], None] = lambda job: None,
    ) -> None:
        """Serve one manager until either side ends the stream. Raises StreamRefused, BadMessage."""
        outbox = Outbox()
        hello = decode_from_group(await anext(read, b""), member=None)
        if not isinstance(hello, Hello):
            raise BadMessage("the first message of a stream is no hello")
        admit(hello.job)
        job, member = self.job(hello.job), hello.report.member
        if len(job.core.seats) >= GROUPS_MAX:
            raise StreamRefused(f"job {hello.job} already has {GROUPS_MAX} replica groups")
        event(log, "group.attached", job=hello.job, replica_id=member.replica_id)
        writer = asyncio.create_task(_write_all(outbox, write))
        reader = asyncio.create_task(self._read_all(job, member, read))
        try:
            job.attach(hello, outbox)
            done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (writer, reader):
                task.cancel()
            job.detach(member.life, outbox)

    async def _read_all(self, job: Job, member: Member, read: AsyncIterator[bytes]) -> None:
        async for data in read:
            report = decode_from_group(data, member=member)
            if not isinstance(report, Report):
                raise BadMessage("a stream said hello twice")
            job.heard(report)

    def status(self) -> JsonDict:
        now = self._clock()
        jobs: Mapping[str, JsonDict] = {
            name: job_status(job.core, job.decision, now) | summary(job.book, now)
            for name, job in sorted(self.jobs.items())
        }
        return {"term": self.records.term, "jobs": jobs}

    def close(self) -> None:
        for job in self.jobs.values():
            job.close()


async def _write_all(outbox: Outbox, write: Callable[[bytes], Awaitable[None]]) -> None:
    while (data := await outbox.queue.get()) is not None:
        await write(data)
