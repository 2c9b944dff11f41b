"""One gRPC call as its handler sees it: messages in, messages out, a status at the end."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol
from urllib.parse import quote

import grpc

from lighthouse.rpc.frames import header_block

REPLY = b"\x88" + header_block([("content-type", "application/grpc")])  # :status 200
TRAILER_OK = header_block([("grpc-status", "0")])
UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
POSTED_MAX = 256
QUEUED_BYTES_MAX = 256 * 1024


class CallFailed(Exception):
    """Ends a call with a status other than OK; `trailer` goes to the client with it."""

    def __init__(
        self, code: grpc.StatusCode, details: str, trailer: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(details)
        self.code, self.details, self.trailer = code, details, trailer or {}


class Pipe(Protocol):
    """What a call needs of its connection."""

    def post(self, call: Call, data: bytes, *, at_once: bool) -> None: ...
    def used(self, call: Call, size: int) -> None: ...
    async def drained_by_peer(self, call: Call) -> None: ...
    def posted(self, call: Call) -> int: ...


class Call:
    """Read and write inside its handler. `post` and `close` may be called from anywhere."""

    __slots__ = (
        "_bytes",
        "_is_over",
        "_messages",
        "_needed",
        "_partial",
        "_pipe",
        "_wake",
        "_withheld",
        "deadline",
        "has_replied",
        "message_bytes_max",
        "metadata",
        "path",
        "peer",
    )

    def __init__(
        self,
        pipe: Pipe,
        *,
        path: str,
        metadata: Mapping[str, str],
        peer: str,
        deadline: float | None,
        message_bytes_max: int,
    ) -> None:
        self.path, self.metadata, self.peer = path, metadata, peer
        self.deadline = deadline  # on the event loop's clock
        self.has_replied = False
        self.message_bytes_max = message_bytes_max
        self._pipe = pipe
        self._messages: deque[bytes] = deque()
        self._bytes = 0  # in `_messages`
        self._partial = bytearray()  # the beginning of a message of `_needed` bytes
        self._needed = 5
        self._withheld = 0  # received, and not given back to the client's windows
        self._is_over = False
        self._wake: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        """The next message, or None when the client or `close` has ended the request."""
        while not self._messages:
            if self._is_over:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        message = self._messages.popleft()
        self._bytes -= len(message)
        self._give_back()
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the client has taken enough of what was sent before."""
        self.post(message)
        await self._pipe.drained_by_peer(self)

    def post(self, message: bytes, *, at_once: bool = True) -> None:
        """Send a message without waiting. A client that leaves too many unread loses the call.

        Not `at_once`: together with the end of the call, in one packet.
        """
        if self._pipe.posted(self) >= POSTED_MAX:
            self.close()
            return
        data = b"\x00" + len(message).to_bytes(4, "big") + message
        self._pipe.post(self, data, at_once=at_once)

    def close(self) -> None:
        """Let `read` return None once all messages are read."""
        self._is_over = True
        self._woken()

    def finished(self) -> None:
        """The handler is gone: nobody will read what is left."""
        self._messages.clear()
        self._bytes = 0
        self._give_back()

    def feed(self, data: bytes) -> None:
        """Cut messages out of the request's bytes. Raises CallFailed when they are none."""
        self._withheld += len(data)
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                self._give_back()
                return
            data = bytes(self._partial)
            self._partial = bytearray()
        rest = self._cut(data)
        if rest < len(data):
            self._partial += data[rest:]
        self._give_back()
        if self._messages:
            self._woken()

    def _cut(self, data: bytes) -> int:
        """Take the whole messages of `data`; return where the first incomplete one begins."""
        at, self._needed = 0, 5
        while len(data) - at >= 5:
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            if size > self.message_bytes_max:
                what = f"a message of {size} bytes; the limit is {self.message_bytes_max}"
                raise CallFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
            if data[at]:
                raise CallFailed(grpc.StatusCode.UNIMPLEMENTED, "messages may not be compressed")
            if len(data) - at < 5 + size:
                self._needed = 5 + size
                break
            self._messages.append(data[at + 5 : at + 5 + size])
            self._bytes += size
            at += 5 + size
        return at

    def _give_back(self) -> None:
        """Let the client send more, unless the handler is far behind: then the client waits."""
        if self._withheld and self._bytes <= QUEUED_BYTES_MAX:
            withheld, self._withheld = self._withheld, 0
            self._pipe.used(self, withheld)

    def _woken(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._wake = None


Handler = Callable[[Call], Awaitable[None]]


def unary(answer: Callable[[bytes, Call], Awaitable[bytes]]) -> Handler:
    """A handler of one message and one reply."""

    async def handler(call: Call) -> None:
        request = await call.read()
        if request is None or await call.read() is not None:
            raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, "a call takes one message")
        call.post(await answer(request, call), at_once=False)

    return handler


def trailer_of(failure: CallFailed) -> bytes:
    number: int = failure.code.value[0]
    details = quote(failure.details[:1000], safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~\"")
    headers = {"grpc-status": str(number), "grpc-message": details, **failure.trailer}
    return header_block(headers.items())


def parse_timeout_s(text: str) -> float | None:
    """`grpc-timeout`: up to eight digits and a unit."""
    match = re.fullmatch(r"(\d{1,8})([HMSmun])", text)
    return int(match[1]) * UNIT_S[match[2]] if match else None
