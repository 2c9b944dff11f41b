"""Keep one stream to a lighthouse: say hello, send reports, receive orders, come back when cut."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

import grpc

from ftcore.base.errors import FtError
from ftcore.base.log import event
from ftcore.base.retry import backoff
from ftcore.wire.channels import leader_of, open_channel, token_metadata
from ftcore.wire.codec import MESSAGE_BYTES_MAX, decode_order
from ftcore.wire.messages import Attached, Order, Refused

log = logging.getLogger("ftcore.daemon")

TOKEN_PATIENCE_S = 30.0  # tokens are rotated by file: not all files change at the same moment
METHOD = "/ftcore.v1.Lighthouse/Attach"
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),  # else a stopped lighthouse is noticed after 60 s
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class LighthouseUnreachable(FtError):
    remedy = (
        "Check the address (lighthouse= or FTCORE_LIGHTHOUSE), that `lighthouse serve` runs there, "
        "and that no firewall lies between."
    )
    retryable = True


class Uplink:
    """Runs in the manager's event loop. `hello` and `report` give the bytes to send."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        hello: Callable[[], bytes],
        report: Callable[[], bytes],
        news: Callable[[], bytes | None],
        order: Callable[[Order], None],
        greeting_timeout_s: float = 1.0,
    ) -> None:
        """`greeting_timeout_s`: a stopped lighthouse still accepts connections."""
        self._greeting_timeout_s = greeting_timeout_s
        self._endpoints = list(endpoints)
        self._hello, self._report, self._news, self._order = hello, report, news, order
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._report_every_s = 0.5
        self._is_greeted = False
        self._token_refused_at: float | None = None
        self._wake = asyncio.Event()
        self._failure = "no answer"
        self._leader = ""
        self.attached = asyncio.Event()
        self.token_patience_s = TOKEN_PATIENCE_S

    def poke(self) -> None:
        """Something happened: send a report now if it says anything new."""
        self._wake.set()

    async def run(self) -> None:
        """Hold the stream, for ever. Rotates through the endpoints with growing, jittered waits."""
        waits = backoff(random.Random(), first_s=0.02, max_s=0.5)
        while True:
            for endpoint in list(self._endpoints):
                self._endpoints.append(self._endpoints.pop(0))  # the one that fails is asked last
                was_attached = await self._hold_stream(endpoint)
                if self._leader:  # a follower said where to go
                    leader, self._leader = self._leader, ""
                    was_attached = await self._hold_stream(leader) or was_attached
                if was_attached:
                    waits = backoff(random.Random(), first_s=0.02, max_s=0.5)
                await asyncio.sleep(next(waits))

    async def _hold_stream(self, endpoint: str) -> bool:
        """One connection, until it breaks. Return whether it was ever accepted."""
        self._is_greeted = False
        async with open_channel(endpoint, OPTIONS) as channel:
            call = channel.stream_stream(METHOD, None, None)(None, metadata=token_metadata())
            self._call = call
            sender = asyncio.create_task(self._send_reports(call))
            try:
                async with asyncio.timeout(self._greeting_timeout_s) as patience:
                    await call.write(self._hello())
                    async for data in call:
                        self._take(decode_order(data), endpoint)
                        if self._is_greeted:
                            patience.reschedule(None)
                self._failure = "the stream was closed"
            except TimeoutError:
                self._failure = f"no greeting in {self._greeting_timeout_s:g} s"
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, FtError) as error:
                self._failure = _reason(error)
                if isinstance(error, grpc.aio.AioRpcError):
                    self._leader = leader_of(error)
                    self._note_token(error)
            finally:
                sender.cancel()
                self._call = None
                call.cancel()
        if self._is_greeted:
            event(log, "lighthouse.lost", endpoint=endpoint, reason=self._failure)
        return self._is_greeted

    def _note_token(self, error: grpc.aio.AioRpcError) -> None:
        """A refused token is tried again, read anew each time; after a while the group is told."""
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return
        now = asyncio.get_running_loop().time()
        if self._token_refused_at is None:
            self._token_refused_at = now
            event(log, "lighthouse.token_refused", reason=error.details())
        elif now >= self._token_refused_at + self.token_patience_s:
            remedy = "Set FTCORE_TOKEN_FILE to a file with this job's token."
            what = f"{error.details()}, for {self.token_patience_s:g} s"
            self._order(Refused(what=what, remedy=remedy))

    def _take(self, order: Order, endpoint: str) -> None:
        if isinstance(order, Attached):
            self._is_greeted, self._token_refused_at = True, None
            self._report_every_s = order.report_every_s
            self.attached.set()
            self.poke()
            event(log, "lighthouse.attached", endpoint=endpoint)
        self._order(order)

    async def _send_reports(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        """Every `report_every_s`, and between at once whatever is new."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._report_every_s
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            is_due = loop.time() >= due
            if is_due:
                due = loop.time() + self._report_every_s
            if not self._is_greeted:
                continue
            data = self._report() if is_due else self._news()
            if data is not None:
                await call.write(data)

    async def wait_attached(self, timeout_s: float) -> None:
        """Raise LighthouseUnreachable when no lighthouse has accepted us in `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.attached.wait()
        except TimeoutError:
            where = ", ".join(self._endpoints)
            raise LighthouseUnreachable(
                f"no lighthouse answered at {where} for {timeout_s:.0f} s: {self._failure}"
            ) from None

    async def say_last(self, data: bytes, *, timeout_s: float = 0.5) -> None:
        """Send a last report and end the stream; the lighthouse has it when this returns."""
        call = self._call
        if call is None or not self._is_greeted:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(data)
                await call.done_writing()
                while not call.done():
                    await asyncio.sleep(0.005)
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)
