"""What a message costs: `python -m tests.bench.lighthouse.front`.

The same stream of 200-byte messages, there and back, through grpcio's own server and through ours;
client and server in one process, so the difference is the server's.
"""

import asyncio
import time

import grpc

from tests.lighthouse.test_front import world

MESSAGES = 20_000


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.stream)

    async def stream(self, requests, context):
        async for request in requests:
            yield request


async def ping_pong(port):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/t/stream")()
        for count in (500, MESSAGES):
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                await call.write(bytes(200))
                await call.read()
        call.cancel()
    return (time.process_time() - cpu) / MESSAGES, (time.perf_counter() - started) / MESSAGES


async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    rows = {"grpcio": await ping_pong(port)}
    await server.stop(grace=None)
    async with world() as (_, port):
        rows["ours"] = await ping_pong(port)
    for name, (cpu_s, took_s) in rows.items():
        print(f"{name}: {cpu_s * 1e6:.0f} µs of CPU there and back, {took_s * 1e6:.0f} µs in all")


if __name__ == "__main__":
    asyncio.run(main())
