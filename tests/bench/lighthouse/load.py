"""N groups on N connections: torchft's unary calls, or our streams."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from ftcore.daemon.uplink import METHOD, OPTIONS
from ftcore.wire.codec import decode_order, encode_hello, encode_report
from ftcore.wire.messages import Attached, Hello, Member, NewQuorum, Report, Want
from lighthouse import torchft_pb2 as pb
from lighthouse.torchft_compat import HEARTBEAT, QUORUM

LIMITS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]


@asynccontextmanager
async def channels(address, count, options=LIMITS):
    made = [grpc.aio.insecure_channel(address, options=options) for _ in range(count)]
    try:
        yield made
    finally:
        await asyncio.gather(*(c.close() for c in made))


async def torchft_rounds(address, count, rounds):
    """For each round: seconds from the last ask to each reply. Nothing of a reply is parsed."""
    results = []
    async with channels(address, count) as made:
        requests = [
            pb.LighthouseQuorumRequest(
                requester=pb.QuorumMember(
                    replica_id=f"train_{i:05}:0123456789abcdef0123456789abcdef",
                    address=f"http://10.0.{i // 256}.{i % 256}:34567",
                    store_address=f"10.0.{i // 256}.{i % 256}:29500",
                    world_size=8,
                )
            ).SerializeToString()
            for i in range(count)
        ]
        calls = [c.unary_unary(QUORUM) for c in made]
        for _ in range(rounds):
            asked, replied = [], []

            async def ask(call, request, asked=asked, replied=replied):
                asked.append(time.perf_counter())
                await call(request, timeout=120)
                replied.append(time.perf_counter())

            await asyncio.gather(*(ask(c, r) for c, r in zip(calls, requests, strict=True)))
            results.append([at - max(asked) for at in replied])
    return results


async def torchft_heartbeats(address, names):
    """One heartbeat for each of very many ids, 3,000 a second: more alive at one time than ours
    admits (20,000) is another story."""
    async with channels(address, 4) as made:
        calls = [c.unary_unary(HEARTBEAT) for c in made]
        names, began = iter(enumerate(names)), time.perf_counter()

        async def worker(call):
            for number, name in names:
                await asyncio.sleep(max(0.0, began + number / 3_000 - time.perf_counter()))
                request = pb.LighthouseHeartbeatRequest(replica_id=name)
                await call(request.SerializeToString(), timeout=60)

        await asyncio.gather(*(worker(calls[i % 4]) for i in range(64)))


class Stream:
    """One group of our protocol: as little as a server can tell from the real one."""

    def __init__(self, channel, job, index):
        member = Member(
            replica_id=f"train_{index:05}",
            incarnation=1,
            store_address=f"10.0.{index // 256}.{index % 256}:29500",
            heal_addresses=tuple(f"10.0.{index // 256}.{index % 256}:{p}" for p in range(4)),
        )
        self.report = Report(member=member, number=1)
        self.job, self.call = job, channel.stream_stream(METHOD, None, None)(None)

    async def attach(self):
        await self.call.write(encode_hello(Hello(job=self.job, report=self.report)))
        assert isinstance(decode_order(await self.call.read()), Attached)

    async def say(self, **changes):
        self.report = replace(self.report, number=self.report.number + 1, **changes)
        await self.call.write(encode_report(self.report))

    async def quorum_bytes(self):
        return await self.call.read()

    async def leave(self):
        """Say that this group is gone and wait until the lighthouse has heard it."""
        await self.say(want=Want.GONE)
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass


async def our_rounds(address, count, rounds):
    """Streams stand open; then all groups ask for a seat. A new job for each round."""
    results, reply_bytes = [], 0
    async with channels(address, count, OPTIONS) as made:
        for number in range(rounds):
            streams = [Stream(c, f"job-{number}", i) for i, c in enumerate(made)]
            await asyncio.gather(*(s.attach() for s in streams))
            asked, replied = [], []

            async def ask(stream, asked=asked, replied=replied):
                asked.append(time.perf_counter())
                await stream.say(want=Want.SEAT)
                data = await stream.quorum_bytes()
                replied.append(time.perf_counter())
                return data

            replies = await asyncio.gather(*(ask(s) for s in streams))
            order = decode_order(replies[0])
            assert isinstance(order, NewQuorum) and len(order.quorum.members) == count
            reply_bytes = len(replies[0])
            results.append([at - max(asked) for at in replied])
            await asyncio.gather(*(s.leave() for s in streams))
    return results, reply_bytes


@asynccontextmanager
async def standing(address, count, *, every_s=0.5):
    """A job of `count` groups in a standing quorum that only send heartbeats."""
    async with channels(address, count, OPTIONS) as made:
        streams = [Stream(c, "steady", i) for i, c in enumerate(made)]
        await asyncio.gather(*(s.attach() for s in streams))
        await asyncio.gather(*(s.say(want=Want.SEAT) for s in streams))
        replies = await asyncio.gather(*(s.quorum_bytes() for s in streams))
        quorum_id = decode_order(replies[0]).quorum.quorum_id
        ticking = [
            asyncio.create_task(_beat(s, quorum_id, i * every_s / count, every_s))
            for i, s in enumerate(streams)
        ]
        try:
            yield
        finally:
            for task in ticking:
                task.cancel()
            await asyncio.gather(*ticking, return_exceptions=True)


async def _beat(stream, quorum_id, first_s, every_s):
    await asyncio.sleep(first_s)
    loop, step = asyncio.get_running_loop(), 0
    due = loop.time()
    while True:
        step += 1
        await stream.say(want=Want.NOTHING, quorum_id=quorum_id, committed=step, lineage=quorum_id)
        due += every_s
        await asyncio.sleep(max(0, due - loop.time()))
