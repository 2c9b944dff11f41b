import asyncio
import random

import pytest

from lighthouse.election import Election
from lighthouse.lease import LeaseLost, LeaseUnreachable, Timing
from lighthouse.lease.memory import MemoryLease, MemoryStore

TIMING = Timing(ttl_s=1.0)


class Server:
    """What an election serves: remembers its tenures."""

    def __init__(self, store, name="a:1", lease=None):
        self.lease = lease or MemoryLease(store, timing=TIMING)
        self.tenures, self.leading = [], asyncio.Event()
        self.holders = []
        self.election = Election(
            self.lease,
            address=name,
            serve=self.serve,
            on_change=self.holders.append,
            rng=random.Random(1),
        )

    async def serve(self, tenure):
        self.tenures.append(tenure)
        self.leading.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.leading.clear()
            assert not tenure.is_valid(), "still valid while stepping down"


def story(tell):
    async def main():
        async with asyncio.timeout(60):
            await tell()

    asyncio.run(main())


def test_a_lone_candidate_leads_and_returns_when_stopped():
    async def tell():
        a = Server(MemoryStore())
        running = asyncio.create_task(a.election.run())
        await a.leading.wait()
        assert a.tenures[0].is_valid()
        a.election.stop()
        await running
        assert not a.tenures[0].is_valid()

    story(tell)


def test_a_stopped_leader_hands_its_records_to_the_next_one():
    async def tell():
        store = MemoryStore()
        a, b = Server(store, "a:1"), Server(store, "b:1")
        async with asyncio.TaskGroup() as group:
            group.create_task(a.election.run())
            await a.leading.wait()
            await a.tenures[0].write("job", b"7")
            group.create_task(b.election.run())
            a.election.stop()
            await b.leading.wait()
            assert b.tenures[0].records == {"job": b"7"}
            assert b.tenures[0].term > a.tenures[0].term
            with pytest.raises(LeaseLost):
                await a.tenures[0].write("job", b"8")
            b.election.stop()

    story(tell)


def test_an_outranked_leader_comes_back_above_the_term_that_managers_have_seen():
    async def tell():
        a = Server(MemoryStore())
        async with asyncio.TaskGroup() as group:
            group.create_task(a.election.run())
            await a.leading.wait()
            a.tenures[0].outranked(90)
            assert not a.tenures[0].is_valid()
            while len(a.tenures) < 2:
                await asyncio.sleep(0)
            assert a.tenures[1].term == 91
            a.election.stop()

    story(tell)


class Cut(MemoryLease):
    """A store that stops answering when `cut` is set."""

    cut = False

    async def renew(self, grant):
        if self.cut:
            raise LeaseUnreachable("cut off")
        return await super().renew(grant)


def test_a_leader_cut_off_from_the_store_stops_before_its_lease_ends():
    async def tell():
        store = MemoryStore()
        a = Server(store, lease=Cut(store, timing=TIMING))
        async with asyncio.TaskGroup() as group:
            group.create_task(a.election.run())
            await a.leading.wait()
            a.lease.cut = True
            while a.tenures[0].is_valid():
                assert store.current() is not None
                await asyncio.sleep(0.01)
            a.election.stop()

    story(tell)


def test_when_serving_fails_the_lease_is_given_back_and_the_error_is_raised():
    async def tell():
        store = MemoryStore()
        a = Server(store)

        async def broken(tenure):
            raise RuntimeError("no port")

        a.election = Election(a.lease, address="a:1", serve=broken)
        with pytest.raises(RuntimeError, match="no port"):
            await a.election.run()
        assert store.current() is None

    story(tell)
