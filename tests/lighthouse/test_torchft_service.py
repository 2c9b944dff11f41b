"""torchft's own Rust clients and managers against our service, no part of torchft replaced."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import grpc
import pytest

from lighthouse.lease.api import Holder, Timing
from lighthouse.lease.memory import MemoryLease, MemoryStore
from lighthouse.torchft_compat import HEARTBEAT, QUORUM, TorchftService
from lighthouse.torchft_quorum import TorchftPolicy

torchft = pytest.importorskip("torchft._torchft")
POLICY = TorchftPolicy(replicas_min=2, join_timeout_s=5, heartbeat_timeout_s=1)


class Tenure:
    """A tenure over a memory lease, without an election."""

    def __init__(self, lease, grant, records):
        self.lease, self.grant, self.records, self.term = lease, grant, records, grant.term
        self.valid = True

    def is_valid(self):
        return self.valid

    async def write(self, job, record):
        await self.lease.write(self.grant, job, record)


class Place:
    """One lighthouse with torchft's service on a port."""

    def __init__(self, store, stack):
        self.store, self.stack, self.leader = store, stack, None
        self.lease = MemoryLease(store, timing=Timing(ttl_s=1000))
        self.service = TorchftService(POLICY, holder=lambda: self.leader)

    async def start(self):
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self.service,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self.stack.push_async_callback(self.service.close)
        self.stack.push_async_callback(server.stop, grace=None)
        return self

    @asynccontextmanager
    async def leading(self):
        grant = await self.lease.acquire(self.address)
        tenure = Tenure(self.lease, grant, await self.lease.read())
        async with self.service.leading(tenure) as core:
            yield core
        await self.lease.release(grant)


def story(tell, places=1):
    async def main():
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            store = MemoryStore()
            made = [await Place(store, stack).start() for _ in range(places)]
            with ThreadPoolExecutor(16) as pool:
                loop = asyncio.get_running_loop()
                await tell(lambda f, *a: loop.run_in_executor(pool, f, *a), *made)

    asyncio.run(main())


def client(place):
    return torchft.LighthouseClient(f"http://{place.address}", timedelta(seconds=10))


def ask(connection, replica_id, step=0, **more):
    """One blocking call of torchft's client."""
    arguments = {"address": "", "store_address": "", "world_size": 1, "shrink_only": False}
    return connection.quorum(
        replica_id=replica_id, timeout=timedelta(seconds=30), step=step, **(arguments | more)
    )


async def beats(run, place, living):
    """Heartbeats of all in `living`, as their managers send them."""
    heart = client(place)
    while True:
        for name in sorted(living):
            await run(heart.heartbeat, name)
        await asyncio.sleep(0.1)


def test_torchfts_client_gets_a_quorum_with_everything_it_said():
    async def tell(run, place):
        async with place.leading():
            a, b = client(place), client(place)
            data = {"colour": "blue"}
            one = run(lambda: ask(a, "a:1", step=7, address="http://x:1", data=data))
            two = run(lambda: ask(b, "b:1", store_address="s:2", world_size=4))
            quorum = await one
            assert (await two).quorum_id == quorum.quorum_id == (1 << 32) + 1
            first, second = quorum.participants
            assert (first.replica_id, first.step, first.address) == ("a:1", 7, "http://x:1")
            assert (second.store_address, second.world_size) == ("s:2", 4)
            assert first.data == data

    story(tell)


def test_a_group_that_dies_is_left_out_after_its_heartbeat_and_the_id_grows():
    async def tell(run, place):
        async with place.leading():
            clients, living = {name: client(place) for name in "abc"}, set("abc")
            beating = asyncio.create_task(beats(run, place, living))
            while len(place.service.core.expiries) < 3:
                await asyncio.sleep(0.01)
            first, *_ = await asyncio.gather(*(run(ask, clients[n], n) for n in "abc"))
            living.remove("c")
            second, _ = await asyncio.gather(*(run(ask, clients[n], n) for n in "ab"))
            assert [p.replica_id for p in second.participants] == ["a", "b"]
            assert second.quorum_id == first.quorum_id + 1
            beating.cancel()

    story(tell)


def test_asking_while_the_leader_changes_the_call_ends_with_the_next_leaders_quorum():
    async def tell(run, one, two):
        for place in (one, two):
            place.leader = Holder(term=1, identity="", address=one.address)
        a, b = client(one), client(two)
        async with one.leading():
            first, _ = await asyncio.gather(run(ask, a, "a"), run(ask, b, "b"))
            waiting = run(ask, b, "b")  # through the follower
            while "b" not in one.service.core.asks:
                await asyncio.sleep(0.01)
        for place in (one, two):
            place.leader = Holder(term=2, identity="", address=two.address)
        async with two.leading():
            second, _ = await asyncio.gather(run(ask, a, "a"), waiting)
        assert second.quorum_id == (2 << 32) + 1 > first.quorum_id

    story(tell, places=2)


def test_managers_of_torchft_join_and_heal_and_restart(tmp_path):
    async def tell(run, place):
        async with place.leading():
            a, b = Manager(place, "a:1"), Manager(place, "b:1")
            one, two = await asyncio.gather(run(a.quorum, 0), run(b.quorum, 0))
            assert one.replica_world_size == 2 and one.quorum_id == two.quorum_id
            assert {one.heal, two.heal} == {False, True}  # one starts from the other's weights
            one, two = await asyncio.gather(run(a.quorum, 5), run(b.quorum, 5))
            assert not one.heal and not two.heal
            b.close()
            c = Manager(place, "b:2")  # the group restarts at step 0
            one, three = await asyncio.gather(run(a.quorum, 6), run(c.quorum, 0))
            while three.replica_world_size < 2:
                one, three = await asyncio.gather(run(a.quorum, 6), run(c.quorum, 0))
            assert three.heal and three.max_step == 6
            assert three.recover_src_manager_address == a.server.address()
            assert one.recover_dst_replica_ranks == [three.replica_rank]
            a.close(), c.close()

    story(tell)


class Manager:
    """torchft's manager server and the client that its Python library uses."""

    def __init__(self, place, replica_id):
        self.server = torchft.ManagerServer(
            replica_id=replica_id,
            lighthouse_addr=f"http://{place.address}",
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr="127.0.0.1:1",
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=timedelta(seconds=10),
            quorum_retries=0,
        )
        self.client = torchft.ManagerClient(self.server.address(), timedelta(seconds=10))

    def quorum(self, step):
        return self.client._quorum(
            group_rank=0,
            step=step,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=30),
            init_sync=True,
            commit_failures=0,
        )

    def close(self):
        self.server.shutdown()


@pytest.mark.parametrize("request_bytes", [b"\xff\xff\xff", b"", b"\n\x00", b"\n\x02\xff"])
def test_malformed_messages_are_refused_with_a_reason(request_bytes):
    async def tell(run, place):
        async with place.leading(), grpc.aio.insecure_channel(place.address) as channel:
            for path in (QUORUM, HEARTBEAT):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(path)(request_bytes, timeout=10)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    story(tell)
