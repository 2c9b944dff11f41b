"""Serve gRPC and HTTP/1 on one port: look at the first bytes, then hand the connection on.

A client that speaks HTTP/2 is spliced to the gRPC server on a private unix socket; any other goes
to the HTTP handler. With TLS the door decrypts, and offers HTTP/1.1 first, so that a browser
(which could speak both) gets the dashboard and a gRPC client (which only offers h2) gets gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ftcore.base.log import event

log = logging.getLogger(__name__)
PREFACE = b"PRI * HTTP/2.0\r\n"


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
    """Counts connections and makes a door for each. `http` makes a protocol for HTTP/1."""

    def __init__(
        self,
        *,
        grpc_socket: str,
        http: Callable[[], asyncio.Protocol],
        limits: FrontLimits | None = None,
    ) -> None:
        self.grpc_socket, self.http = grpc_socket, http
        self.limits = limits or FrontLimits()
        self.doors: set[Door] = set()
        self.refused = 0
        self.cut_off = 0

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
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for door in list(self.doors):
                door.abort()

    def is_full(self) -> bool:
        return len(self.doors) >= self.limits.connections_max


class Door(asyncio.Protocol):
    """One accepted connection, until its first bytes say what it is."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
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
        self._timer = self._loop.call_later(front.limits.first_bytes_timeout_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._behind is not None:
            self._behind.data_received(data)
            return
        self._first += data
        if self._opening is not None or PREFACE.startswith(self._first):
            return  # too little to tell
        if self._first.startswith(PREFACE):
            self._open_grpc()
        else:
            self._hand_to(self._front.http())

    def _open_grpc(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        self._opening = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        assert self._transport is not None
        outside = Splice(self._front)
        try:
            transport, inside = await self._loop.create_unix_connection(
                lambda: Splice(self._front), self._front.grpc_socket
            )
        except OSError as error:
            event(log, "front.no_grpc", level=logging.ERROR, why=str(error))
            self._transport.abort()
            return
        if self._transport.is_closing():
            transport.abort()
            return
        inside.join(outside, transport)
        outside.join(inside, self._transport, on_lost=lambda: self.connection_lost(None))
        self._hand_to(outside)
        self._transport.set_protocol(outside)  # spares a call for each piece of data
        self._transport.resume_reading()

    def _hand_to(self, protocol: asyncio.Protocol) -> None:
        """From now on `protocol` gets everything, beginning with what was read already."""
        assert self._transport is not None
        if self._timer is not None:
            self._timer.cancel()
        self._behind, first = protocol, self._first
        self._first = b""
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
        self._front.doors.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._behind is not None and not isinstance(self._behind, Splice):
            self._behind.connection_lost(exc)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Splice(asyncio.Protocol):
    """One end of a pipe: what it reads, the other end writes. Full buffers hold the sender back."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._other: Splice | None = None
        self._transport: asyncio.Transport | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], None] = lambda: None

    def join(
        self,
        other: Splice,
        transport: asyncio.Transport,
        *,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._other, self._transport, self._on_lost = other, transport, on_lost
        transport.set_write_buffer_limits(high=self._front.limits.buffer_bytes)

    def data_received(self, data: bytes) -> None:
        assert self._other is not None and self._other._transport is not None
        self._other._transport.write(data)

    def pause_writing(self) -> None:
        assert self._other is not None and self._other._transport is not None
        self._other._transport.pause_reading()
        limit_s = self._front.limits.stall_timeout_s
        self._stalled = asyncio.get_running_loop().call_later(limit_s, self._cut_off)

    def resume_writing(self) -> None:
        assert self._other is not None and self._other._transport is not None
        self._forget_stall()
        self._other._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        self._on_lost()
        if self._other is not None and self._other._transport is not None:
            self._other._transport.close()

    def _cut_off(self) -> None:
        self._front.cut_off += 1
        event(log, "front.slow_reader_cut_off", level=logging.WARNING, total=self._front.cut_off)
        assert self._transport is not None
        self._transport.abort()

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
