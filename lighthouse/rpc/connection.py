"""Serve the gRPC calls of one accepted connection that speaks HTTP/2."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc

from ftcore.base.log import event
from lighthouse.rpc import call as calls
from lighthouse.rpc.call import Call, CallFailed, Handler, parse_timeout_s, trailer_of
from lighthouse.rpc.frames import NO_ERROR, Http2Error, header_block
from lighthouse.rpc.http2 import Headers, Http2, Stream

log = logging.getLogger(__name__)
NOT_GRPC = header_block([(":status", "415")])


@dataclass(slots=True, kw_only=True)
class Service:
    """What all connections share. `cut_off` counts readers that were too slow.

    buffer_bytes: how much waits for a slow reader before its sender is held back.
    stall_timeout_s: a client that takes nothing for so long, with something waiting, is cut off.
    """

    handlers: Mapping[str, Handler]
    message_bytes_max: int = 4 << 20
    buffer_bytes: int = 256 * 1024
    stall_timeout_s: float = 30.0
    cut_off: int = 0
    refused: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Connection(asyncio.Protocol):
    """Gives each request to its handler, in a task that ends with the request or with us."""

    def __init__(self, service: Service, *, on_lost: Callable[[], None] = lambda: None) -> None:
        self._service, self._on_lost = service, on_lost
        self._loop = asyncio.get_running_loop()
        self._http2 = Http2(self, self._loop.time)
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._streams: dict[Call, Stream] = {}
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._is_paused = False
        self._stalled: asyncio.TimerHandle | None = None
        self._waiters: dict[Call, asyncio.Future[None]] = {}
        self.heard_at = self._loop.time()

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._peer = str(transport.get_extra_info("peername"))
        transport.set_write_buffer_limits(high=self._service.buffer_bytes)
        self._send()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            self._http2.receive(data)
        except Http2Error as error:
            self._service.refused += 1
            event(log, "connection.refused", peer=self._peer, why=str(error))
            self._http2.go_away(error.code, str(error))
            self._send()
            self._close()
            return
        self._send()
        if self._stalled is not None:
            self._watch_for_stall(again=True)

    def pause_writing(self) -> None:
        self._is_paused = True
        self._watch_for_stall()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._watch_for_stall(again=True)
        for call, stream in list(self._streams.items()):
            if not stream.waiting:
                self._wake(call)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._transport = None
        self._on_lost()

    def eof_received(self) -> None:
        """The client has hung up: asyncio closes the connection when this returns nothing."""

    def sweep(self, now: float, *, quiet_s: float, dead_s: float) -> None:
        """Called now and then: ask a quiet peer for a sign of life, give up a dead one."""
        if now >= self.heard_at + dead_s:
            self.abort()
        elif now >= self.heard_at + quiet_s:
            self._http2.ping()
            self._send()

    def go_away(self) -> None:
        """Tell the client that this server is leaving, and close."""
        self._http2.go_away(NO_ERROR, "the server is leaving")
        self._send()
        self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self) -> None:
        if self._http2.has_output() and self._transport is not None:
            self._transport.write(self._http2.take())

    def _watch_for_stall(self, *, again: bool = False) -> None:
        """Have a timer while something waits for the client; `again`: it has just moved."""
        is_blocked = self._is_paused or bool(self._http2.blocked)
        if self._stalled is not None and (again or not is_blocked):
            self._stalled.cancel()
            self._stalled = None
        if is_blocked and self._stalled is None:
            limit_s = self._service.stall_timeout_s
            self._stalled = self._loop.call_later(limit_s, self._cut_off)

    def _cut_off(self) -> None:
        self._service.cut_off += 1
        total = self._service.cut_off
        event(log, "connection.slow_reader_cut_off", level=logging.WARNING, total=total)
        self.abort()

    # Events of HTTP/2

    def requested(self, stream: Stream, headers: Headers) -> None:
        known = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        if not known.get("content-type", "").startswith("application/grpc"):
            self._http2.end(stream, NOT_GRPC)
            return
        timeout_s = parse_timeout_s(known.get("grpc-timeout", ""))
        call = Call(
            self,
            path=known.get(":path", ""),
            metadata=known,
            peer=self._peer,
            deadline=None if timeout_s is None else self._loop.time() + timeout_s,
            message_bytes_max=self._service.message_bytes_max,
        )
        stream.call = call
        self._streams[call] = stream
        handler = self._service.handlers.get(call.path, _unknown)
        task = self._tasks[stream] = self._loop.create_task(self._run(call, stream, handler))
        self._service.tasks.add(task)
        task.add_done_callback(self._service.tasks.discard)

    def received(self, stream: Stream, data: bytes) -> None:
        call = stream.call
        assert isinstance(call, Call)
        try:
            call.feed(data)
        except CallFailed as failure:
            self._tasks[stream].cancel()
            self._end(call, stream, trailer_of(failure))

    def peer_ended(self, stream: Stream) -> None:
        if isinstance(stream.call, Call):
            stream.call.close()

    def was_reset(self, stream: Stream) -> None:
        if stream in self._tasks:
            self._tasks[stream].cancel()

    def drained(self, stream: Stream) -> None:
        if isinstance(stream.call, Call) and not self._is_paused:
            self._wake(stream.call)

    def _wake(self, call: Call) -> None:
        waiter = self._waiters.pop(call, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # What calls need

    def post(self, call: Call, data: bytes, *, at_once: bool) -> None:
        stream = self._streams.get(call)
        if stream is None:
            return  # the call is over
        if not call.has_replied:
            call.has_replied = True
            self._http2.send_headers(stream, calls.REPLY)
        self._http2.send(stream, data)
        if at_once:
            self._send()
        if self._http2.blocked:
            self._watch_for_stall()

    def used(self, call: Call, size: int) -> None:
        stream = self._streams.get(call)
        if stream is not None:
            self._http2.used(stream, size)
            self._send()

    def posted(self, call: Call) -> int:
        stream = self._streams.get(call)
        return len(stream.waiting) if stream is not None else 0

    async def drained_by_peer(self, call: Call) -> None:
        stream = self._streams.get(call)
        if stream is not None and (self._is_paused or stream.waiting):
            waiter = self._waiters[call] = self._loop.create_future()
            await waiter

    async def _run(self, call: Call, stream: Stream, handler: Handler) -> None:
        trailer = calls.TRAILER_OK
        try:
            async with asyncio.timeout_at(call.deadline):
                await handler(call)
        except CallFailed as failure:
            trailer = trailer_of(failure)
        except TimeoutError:
            trailer = trailer_of(CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "too late"))
        except Exception:
            log.exception("a call of %s failed", call.path)
            trailer = trailer_of(CallFailed(grpc.StatusCode.INTERNAL, "see the lighthouse's log"))
        finally:
            del self._tasks[stream]
            self._end(call, stream, trailer)

    def _end(self, call: Call, stream: Stream, trailer: bytes) -> None:
        """Close the reply; a second time, or after a reset, it does nothing."""
        if self._streams.get(call) is None:
            return
        call.finished()
        del self._streams[call]
        if stream.id in self._http2.streams:
            block = trailer if call.has_replied else calls.REPLY + trailer
            self._http2.end(stream, block)
            self._send()


async def _unknown(call: Call) -> None:
    raise CallFailed(grpc.StatusCode.UNIMPLEMENTED, f"there is no {call.path} here")
