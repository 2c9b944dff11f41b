"""Run one candidate for leadership: follow, lead while the lease lasts, step down, follow again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from ftcore.base.log import event
from lighthouse.lease import candidate as pure
from lighthouse.lease.api import Clock, Grant, Holder, Lease, monotonic_s
from lighthouse.lease.candidate import Candidate, End, Move, Sleep
from lighthouse.lease.errors import LeaseLost, LeaseUnreachable

log = logging.getLogger(__name__)


class Tenure:
    """One time of leadership, as the server sees it. Check `is_valid` before each answer."""

    def __init__(self, election: Election, term: int, records: dict[str, bytes]) -> None:
        self._election = election
        self.term = term
        self.records = records

    def is_valid(self) -> bool:
        """Whether this lighthouse leads right now. False for ever once it was False."""
        return self._election.leads_in(self.term)

    async def write(self, job: str, record: bytes | None) -> None:
        """Make a record durable. Raises LeaseLost when another lighthouse leads."""
        await self._election.write(self.term, job, record)

    def outranked(self, term: int) -> None:
        """A manager has seen a higher `term`: step down, and ask for a term above it."""
        self._election.outranked(term)


Serve = Callable[[Tenure], Awaitable[None]]


class Election:
    """A candidate at `lease`. `serve(tenure)` runs while it leads and is cancelled when it ends.

    `holder` is who leads as far as this candidate knows; `on_change` is called after each change.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        address: str,
        serve: Serve,
        on_change: Callable[[Holder | None], None] = lambda holder: None,
        clock: Clock = monotonic_s,
        rng: random.Random | None = None,
    ) -> None:
        self._lease, self._address, self._serve = lease, address, serve
        self._on_change, self._clock = on_change, clock
        self._rng = rng or random.Random()
        self._state = Candidate(timing=lease.timing, identity=lease.identity)
        self._woken = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def holder(self) -> Holder | None:
        return self._state.holder

    def leads_in(self, term: int) -> bool:
        grant = self._state.grant
        return grant is not None and grant.term == term and self._state.leads(self._clock())

    async def write(self, term: int, job: str, record: bytes | None) -> None:
        grant = self._state.grant
        if grant is None or grant.term != term:
            raise LeaseLost(f"term {term} has ended", term=term)
        try:
            await self._lease.write(grant, job, record)
        except LeaseLost:
            self._become(pure.lost(self._state))
            raise

    def outranked(self, term: int) -> None:
        self._become(pure.outranked(self._state, term))

    def stop(self) -> None:
        """Hand over at once: stop answering, give the lease back, return from `run`."""
        self._stopping = True
        self._become(pure.ended(self._state, End.RELEASED))

    async def run(self) -> None:
        """Returns after `stop`. Raises what `serve` raised; the lease is given back first."""
        watching = asyncio.create_task(self._watch(), name="election.watch")
        try:
            while not (self._stopping and self._state.grant is None):
                await self._move(pure.next_move(self._state, self._clock()))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if self._state.grant is not None:
                await self._step_down()

    async def _move(self, move: Move | Sleep) -> None:
        match move:
            case Sleep(until=until):
                await self._sleep(until)
            case Move.ACQUIRE:
                await self._acquire()
            case Move.RENEW:
                await self._renew()
            case Move.STEP_DOWN:
                await self._step_down()

    async def _acquire(self) -> None:
        try:
            async with asyncio.timeout(2 * self._lease.timing.ttl_s):
                answer = await self._lease.acquire(self._address, term_min=self._state.term_min)
                records = await self._lease.read() if isinstance(answer, Grant) else {}
        except (LeaseUnreachable, TimeoutError) as error:
            event(log, "election.unanswered", level=logging.WARNING, why=str(error) or "timeout")
            self._become(pure.unanswered(self._state, self._clock(), self._rng.random()))
            return
        self._become(pure.answered(self._state, answer, self._clock(), self._rng.random()))
        if self._state.grant is not None:
            self._start_serving(self._state.grant, records)

    def _start_serving(self, grant: Grant, records: dict[str, bytes]) -> None:
        event(log, "election.won", term=grant.term, address=self._address, records=len(records))
        if self._stopping:
            self._become(pure.ended(self._state, End.RELEASED))
        tenure = Tenure(self, grant.term, records)
        self._serving = asyncio.ensure_future(self._serve(tenure))
        self._serving.add_done_callback(lambda _: self._end_of_serving())

    def _end_of_serving(self) -> None:
        self._become(pure.ended(self._state, End.FAILED))

    async def _renew(self) -> None:
        grant = self._state.grant
        assert grant is not None
        try:
            async with asyncio.timeout(grant.valid_until - self._clock()):
                newer = await self._until_ended(self._lease.renew(grant))
        except LeaseLost:
            self._become(pure.lost(self._state))
        except (LeaseUnreachable, TimeoutError) as error:
            event(log, "election.renewal_failed", level=logging.WARNING, why=str(error))
            self._become(pure.unanswered(self._state, self._clock(), self._rng.random()))
        else:
            if newer is not None:
                self._become(pure.renewed(self._state, newer, self._clock()))

    async def _until_ended(self, renewal: Awaitable[Grant]) -> Grant | None:
        """The renewed grant, or None when the tenure was ended meanwhile: SIGTERM does not wait."""
        task = asyncio.ensure_future(renewal)
        try:
            while self._state.end is None and not task.done():
                self._woken.clear()
                woken = asyncio.ensure_future(self._woken.wait())
                await asyncio.wait((task, woken), return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
            return task.result() if task.done() else None
        finally:
            task.cancel()

    async def _step_down(self) -> None:
        """The tenure is over for everyone who asks before the first await here."""
        grant, why = self._state.grant, self._state.end or End.EXPIRED
        assert grant is not None
        self._become(pure.ended(self._state, why))
        event(log, "election.stepped_down", term=grant.term, why=why.value)
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
        await self._release(grant)
        if serving is not None:
            await asyncio.wait((serving,))
        self._become(pure.stepped_down(self._state, self._clock(), self._rng.random()))
        if serving is not None and not serving.cancelled():
            serving.result()

    async def _release(self, grant: Grant) -> None:
        try:
            async with asyncio.timeout(self._lease.timing.ttl_s):
                await self._lease.release(grant)
        except (LeaseUnreachable, TimeoutError):
            pass  # it ends by itself

    async def _watch(self) -> None:
        while True:
            try:
                async for holder in self._lease.watch():
                    self._become(pure.sighted(self._state, holder, self._clock()))
            except LeaseUnreachable as error:
                event(log, "election.watch_failed", level=logging.WARNING, why=str(error))
            await asyncio.sleep(self._lease.timing.renew_every_s)

    async def _sleep(self, until: float) -> None:
        self._woken.clear()
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await self._woken.wait()
        except TimeoutError:
            pass

    def _become(self, state: Candidate) -> None:
        before, self._state = self._state, state
        self._woken.set()
        if state.holder != before.holder:
            self._on_change(state.holder)
