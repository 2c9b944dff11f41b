"""One lighthouse process: leads all jobs while it holds the lease, else says who does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from ftcore.base.log import event
from ftcore.wire.channels import LEADER, open_channel
from ftcore.wire.codec import encode_order
from ftcore.wire.errors import BadMessage
from ftcore.wire.messages import Refused
from lighthouse.election import Election, Tenure
from lighthouse.errors import Deposed, StreamRefused
from lighthouse.lease import Holder, Lease
from lighthouse.quorum import Policy
from lighthouse.records import Records
from lighthouse.rpc.call import Call, CallFailed, Handler
from lighthouse.security import TokenFile, bearer
from lighthouse.server import Lighthouse
from lighthouse.torchft_compat import TorchftService
from lighthouse.torchft_quorum import TorchftPolicy

log = logging.getLogger("lighthouse")
ATTACH = "/ftcore.v1.Lighthouse/Attach"
MESSAGES_PER_S_MAX = 500  # a group sends about ten a second at most


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

    def handlers(self) -> dict[str, Handler]:
        """Who answers which path."""
        return {ATTACH: self._attach, **self.torchft.handlers()}

    async def _attach(self, call: Call) -> None:
        lighthouse = self.lighthouse
        if lighthouse is None:
            raise self._elsewhere()
        token = bearer(call.metadata.get("authorization", ""))

        def admit(job: str) -> None:
            if self.tokens is not None and not self.tokens.allows(job, token):
                what = f"the token is not good for job {job!r}"
                event(log, "stream.refused", peer=call.peer, reason=what)
                raise CallFailed(grpc.StatusCode.UNAUTHENTICATED, what)

        try:
            await lighthouse.serve_stream(Slowed(call), call, admit=admit)
        except (BadMessage, StreamRefused) as error:
            event(log, "stream.refused", peer=call.peer, reason=str(error))
            call.post(encode_order(Refused(what=str(error), remedy=error.remedy)))
        if self.lighthouse is not lighthouse:
            raise self._elsewhere()

    def _elsewhere(self) -> CallFailed:
        holder = self.holder
        if holder is not None and holder.identity != self.lease.identity:
            what = f"the leader is {holder.address}"
            return CallFailed(grpc.StatusCode.UNAVAILABLE, what, {LEADER: holder.address})
        return CallFailed(grpc.StatusCode.UNAVAILABLE, "no lighthouse leads at present")


class Slowed:
    """Reads a call, but a group that floods waits: its own sending blocks, nobody else's."""

    def __init__(self, call: Call) -> None:
        self._call, self._loop = call, asyncio.get_running_loop()
        self._window_end, self._count, self._told = 0.0, 0, False

    async def read(self) -> bytes | None:
        message = await self._call.read()
        now = self._loop.time()
        if now >= self._window_end:
            self._window_end, self._count = now + 1.0, 0
        self._count += 1
        if self._count > MESSAGES_PER_S_MAX:
            if not self._told:
                self._told = True
                event(log, "stream.slowed", level=logging.WARNING, per_s_max=MESSAGES_PER_S_MAX)
            await asyncio.sleep(self._window_end - now)
        return message
