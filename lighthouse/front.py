"""Serve gRPC and HTTP/1 on one port: look at the first bytes, then hand the connection on.

With TLS the door decrypts, and offers HTTP/1.1 first, so that a browser (which could speak both)
gets the dashboard and a gRPC client (which only offers h2) gets gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ftcore.base.log import event
from lighthouse.rpc.call import Handler
from lighthouse.rpc.connection import Connection, Service

log = logging.getLogger(__name__)
PREFACE = b"PRI * HTTP/2.0\r\n"
QUIET_S, DEAD_S = 10.0, 20.0  # a gRPC client says something at least so often, if only a ping
SWEEP_EVERY_S = 5.0
LAST_WORDS_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """What one client, and all together, may take.

    first_bytes_timeout_s: a connection that says nothing is closed after this.
    buffer_bytes: how much waits for a slow reader before its sender is held back.
    stall_timeout_s: a client that reads nothing for so long, with a full buffer, is cut off.
    """

    connections_max: int = 20_000
    first_bytes_timeout_s: float = 10.0
    buffer_bytes: int = 256 * 1024
    stall_timeout_s: float = 30.0
    handshake_timeout_s: float = 10.0


def raise_open_files_limit() -> int:
    """Allow this process as many open files as the system lets it. Returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


class Front:
    """Counts connections and makes a door for each.

    `handlers` answer gRPC calls by path; `http` makes a protocol for HTTP/1.
    """

    def __init__(
        self,
        *,
        handlers: Mapping[str, Handler],
        http: Callable[[], asyncio.Protocol],
        limits: FrontLimits | None = None,
    ) -> None:
        self.limits = limits or FrontLimits()
        self.http = http
        self.rpc = Service(
            handlers=handlers,
            buffer_bytes=self.limits.buffer_bytes,
            stall_timeout_s=self.limits.stall_timeout_s,
        )
        self.doors: set[Door] = set()
        self.refused = 0

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[int]:
        """Accept connections inside the `with`; yields the port. Closes all of them at the end."""
        server = await asyncio.get_running_loop().create_server(
            lambda: Door(self),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=self.limits.handshake_timeout_s if tls else None,
            backlog=1024,
        )
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            sweeping.cancel()
            await self._close_doors()

    async def _sweep(self) -> None:
        """Notice clients whose machine is gone: nothing closes their connections."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            for door in list(self.doors):
                if door.rpc is not None:
                    door.rpc.sweep(loop.time(), quiet_s=QUIET_S, dead_s=DEAD_S)

    async def _close_doors(self) -> None:
        """Let calls that end by themselves say so, then close everything."""
        await _gone(self.rpc.tasks, LAST_WORDS_S)
        for door in list(self.doors):
            door.go_away()
        await _gone(self.doors, LAST_WORDS_S)
        for door in list(self.doors):
            door.abort()

    def is_full(self) -> bool:
        return len(self.doors) >= self.limits.connections_max


async def _gone(things: Sized, patience_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + patience_s
    while things and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.001)


class Door(asyncio.Protocol):
    """One accepted connection, until its first bytes say what it is."""

    def __init__(self, front: Front) -> None:
        self.rpc: Connection | None = None
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None
        self._behind: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, front = transport, self._front
        if front.is_full():
            front.refused += 1
            if front.refused & (front.refused - 1) == 0:  # the first, second, fourth, …
                event(log, "front.full", level=logging.WARNING, refused=front.refused)
            transport.abort()
            return
        front.doors.add(self)
        limit_s = front.limits.first_bytes_timeout_s
        self._timer = asyncio.get_running_loop().call_later(limit_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._behind is not None:
            self._behind.data_received(data)
            return
        self._first += data
        if PREFACE.startswith(self._first):
            return  # too little to tell
        if self._first.startswith(PREFACE):
            self.rpc = Connection(self._front.rpc, on_lost=self._closed)
            self._hand_to(self.rpc)
        else:
            self._hand_to(self._front.http())

    def _hand_to(self, protocol: asyncio.Protocol) -> None:
        """From now on `protocol` gets everything, beginning with what was read already."""
        assert self._transport is not None
        if self._timer is not None:
            self._timer.cancel()
        self._behind, first = protocol, self._first
        self._first = b""
        if protocol is self.rpc:
            self._transport.set_protocol(protocol)  # spares a call for each piece of data
        protocol.connection_made(self._transport)
        protocol.data_received(first)

    def eof_received(self) -> bool | None:
        return self._behind.eof_received() if self._behind is not None else None

    def pause_writing(self) -> None:
        if self._behind is not None:
            self._behind.pause_writing()

    def resume_writing(self) -> None:
        if self._behind is not None:
            self._behind.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed()
        if self._behind is not None:
            self._behind.connection_lost(exc)

    def _closed(self) -> None:
        self._front.doors.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def go_away(self) -> None:
        if self.rpc is not None:
            self.rpc.go_away()
        elif self._transport is not None:
            self._transport.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
