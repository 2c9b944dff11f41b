"""What the front costs per message: `python -m tests.bench.lighthouse.front`.

The same stream of 200-byte messages, there and back, over the private unix socket and through the
front; client and server in one process, so the difference of CPU time is the front's.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import grpc

from tests.lighthouse.test_front import world

MESSAGES = 20_000


async def ping_pong(target):
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream("/t/stream")()
        for count in (500, MESSAGES):
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                await call.write(bytes(200))
                await call.read()
        call.cancel()
    return (time.process_time() - cpu) / MESSAGES, (time.perf_counter() - started) / MESSAGES


async def main():
    with tempfile.TemporaryDirectory() as directory:
        async with world(Path(directory)) as (_, port):
            bare, bare_s = await ping_pong(f"unix:{directory}/grpc.sock")
            through, through_s = await ping_pong(f"127.0.0.1:{port}")
    print(f"there and back: {bare * 1e6:.0f} µs of CPU bare, {through * 1e6:.0f} through the front")
    print(f"round trip: {bare_s * 1e6:.0f} µs bare, {through_s * 1e6:.0f} through the front")


if __name__ == "__main__":
    asyncio.run(main())
