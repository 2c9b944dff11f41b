"""A bad network between a client and a real server: an L4 proxy whose faults change at run time."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from dataclasses import dataclass

REQUESTS = (b"PUT ", b"GET ", b"POST ", b"HEAD ", b"DELETE ")
SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 56\r\n"
    b"Connection: close\r\n\r\n<Error><Code>SlowDown</Code><Message>m</Message></Error>"
)


@dataclass
class Faults:
    """What is wrong now. Counts go down as connections or requests meet the fault."""

    latency_s: float = 0.0  # each way
    bytes_per_s: float = 0.0  # per connection and way; 0 is no limit
    is_silent: bool = False  # takes everything, forwards and answers nothing
    resets: int = 0  # so many connections are reset ...
    reset_after: int = 0  # ... once so many bytes went through them
    half_closes: int = 0  # so many answers end too early, with a FIN ...
    half_close_after: int = 0  # ... after so many bytes
    lost_answers: int = 0  # so many requests are done, but their answer never comes
    refusals: int = 0  # so many requests are answered by the proxy itself
    refusal: bytes = SLOW_DOWN


class FaultProxy:
    """Signatures stay valid: nothing of a request is changed.

    >>> with FaultProxy(server_port) as proxy:                          # doctest: +SKIP
    ...     proxy.faults.latency_s = 0.02
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream = upstream_port
        self.faults = Faults()
        self.connections = 0
        self.requests: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            up = await asyncio.open_connection("127.0.0.1", self._upstream, limit=1 << 20)
            pair = _Pair(self, (reader, writer), up)
            await asyncio.gather(pair.requests(), pair.answers(), return_exceptions=True)
        finally:
            writer.close()


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: FaultProxy, client: tuple, server: tuple) -> None:
        self._proxy, self._faults = proxy, proxy.faults
        self._client_reader, self._client_writer = client
        self._server_reader, self._server_writer = server
        self._through = 0
        self._loses_answer = False
        self._resets = False

    async def requests(self) -> None:
        try:
            while data := await self._client_reader.read(1 << 18):
                if data.startswith(REQUESTS):
                    self._proxy.requests.append(data.split(b"\r\n", 1)[0])
                    if self._take("refusals"):
                        return await self._refuse()
                    self._loses_answer = self._take("lost_answers")
                await self._pass(data, self._server_writer)
        finally:
            self._server_writer.close()

    async def answers(self) -> None:
        came = 0
        try:
            while data := await self._server_reader.read(1 << 18):
                if self._loses_answer:
                    return self._reset()
                came += len(data)
                over = came - self._faults.half_close_after
                if over > 0 and self._take("half_closes"):
                    self._client_writer.write(data[: len(data) - over])
                    return
                await self._pass(data, self._client_writer)
        finally:
            self._client_writer.close()

    async def _refuse(self) -> None:
        self._client_writer.write(self._faults.refusal)
        await self._client_writer.drain()
        self._client_writer.close()

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        faults = self._faults
        while faults.is_silent:
            await asyncio.sleep(0.02)
        self._through += len(data)
        if self._through > faults.reset_after and self._take("resets"):
            return self._reset()
        start = time.monotonic()
        if faults.latency_s:
            await asyncio.sleep(faults.latency_s)
        if faults.bytes_per_s:
            await asyncio.sleep(len(data) / faults.bytes_per_s - (time.monotonic() - start))
        writer.write(data)
        await writer.drain()

    def _take(self, name: str) -> bool:
        """Whether this one meets the fault; then there is one less."""
        left = getattr(self._faults, name)
        if left > 0:
            setattr(self._faults, name, left - 1)
        return left > 0

    def _reset(self) -> None:
        for writer in (self._client_writer, self._server_writer):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
