"""One lighthouse process: leads all jobs while it holds the lease, else says who does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from ftcore.base.log import event
from ftcore.wire.channels import LEADER, open_channel
from ftcore.wire.codec import MESSAGE_BYTES_MAX, encode_order
from ftcore.wire.errors import BadMessage
from ftcore.wire.messages import Refused
from lighthouse.election import Election, Tenure
from lighthouse.errors import BadToken, Deposed, StreamRefused
from lighthouse.lease import Holder, Lease
from lighthouse.quorum import Policy
from lighthouse.records import Records
from lighthouse.security import TokenFile, bearer
from lighthouse.server import Lighthouse
from lighthouse.torchft_compat import TorchftService
from lighthouse.torchft_quorum import TorchftPolicy

log = logging.getLogger("lighthouse")
MESSAGES_PER_S_MAX = 500  # a group sends about ten a second at most
GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),  # managers ping each second; a delay makes two come close
    ("grpc.keepalive_permit_without_calls", 1),
]


class Host:
    """Answers managers. `lighthouse` is there exactly while this process leads."""

    def __init__(
        self,
        policy: Policy,
        *,
        lease: Lease,
        make_records: Callable[[Tenure], Records],
        tokens: TokenFile | None = None,
        torchft: TorchftPolicy | None = None,
    ) -> None:
        self.lighthouse: Lighthouse | None = None
        self.tokens = tokens
        self.elections_won = 0
        self.changed = asyncio.Event()
        self._ended = asyncio.Event()
        self.torchft = TorchftService(
            torchft or TorchftPolicy(replicas_min=policy.replicas_min),
            holder=lambda: self.holder,
            connect=open_channel,
        )
        self.policy, self.lease, self._make_records = policy, lease, make_records
        self._election: Election | None = None

    @property
    def holder(self) -> Holder | None:
        return self._election.holder if self._election else None

    async def run(self, address: str) -> None:
        """Stand for election as `address` until `stop`."""
        self._election = Election(
            self.lease, address=address, serve=self._lead, on_change=self._note_holder
        )
        try:
            await self._election.run()
        finally:
            self._ended.set()
            await self.torchft.close()

    async def ended(self) -> None:
        """Returns when `run` has."""
        await self._ended.wait()

    def stop(self) -> None:
        """Hand over at once and let `run` return."""
        if self._election is not None:
            self._election.stop()

    def _note_holder(self, holder: Holder | None) -> None:
        self.changed.set()
        if holder is not None:
            event(log, "leader.known", address=holder.address, term=holder.term)

    async def _lead(self, tenure: Tenure) -> None:
        """Serve all jobs until cancelled, or until nothing more can be made durable."""
        lighthouse = Lighthouse(self.policy, self._make_records(tenure), clock=time.monotonic)
        self.elections_won += 1
        try:
            async with self.torchft.leading(tenure):
                self.lighthouse = lighthouse
                self.changed.set()
                error = await lighthouse.failed
        finally:
            self.lighthouse = None
            lighthouse.close()
        if not isinstance(error, Deposed):
            raise error

    # gRPC

    def make_grpc_server(self) -> grpc.aio.Server:
        """A server without a port yet, with limits that a bad client cannot get past."""
        server = grpc.aio.server(options=GRPC_OPTIONS)
        method = grpc.stream_stream_rpc_method_handler(self._attach)
        ours = grpc.method_handlers_generic_handler("ftcore.v1.Lighthouse", {"Attach": method})
        server.add_generic_rpc_handlers((ours, self.torchft))
        return server

    async def _attach(self, requests: AsyncIterator[bytes], context: Any) -> None:
        lighthouse = self.lighthouse
        if lighthouse is None:
            await self._point_to_leader(context)
            return
        token = bearer(dict(context.invocation_metadata()).get("authorization", ""))

        def admit(job: str) -> None:
            if self.tokens is not None and not self.tokens.allows(job, token):
                raise BadToken(f"the token is not good for job {job!r}")

        try:
            await lighthouse.serve_stream(slowed(aiter(requests)), context.write, admit=admit)
        except BadToken as error:
            event(log, "stream.refused", peer=context.peer(), reason=str(error))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except (BadMessage, StreamRefused) as error:
            event(log, "stream.refused", peer=context.peer(), reason=str(error))
            await context.write(encode_order(Refused(what=str(error), remedy=error.remedy)))
        if self.lighthouse is not lighthouse:
            await self._point_to_leader(context)

    async def _point_to_leader(self, context: Any) -> None:
        holder = self.holder
        if holder is not None and holder.identity != self.lease.identity:
            context.set_trailing_metadata(((LEADER, holder.address),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the leader is {holder.address}")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no lighthouse leads at present")


async def slowed(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same messages, but a group that floods waits: its own sending blocks, nobody else's."""
    loop = asyncio.get_running_loop()
    window_end, count, told = loop.time() + 1.0, 0, False
    async for message in messages:
        now = loop.time()
        if now >= window_end:
            window_end, count = now + 1.0, 0
        count += 1
        if count > MESSAGES_PER_S_MAX:
            if not told:
                told = True
                event(log, "stream.slowed", level=logging.WARNING, per_s_max=MESSAGES_PER_S_MAX)
            await asyncio.sleep(window_end - now)
        yield message
