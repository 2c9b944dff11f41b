"""Speak torchft's gRPC protocol, so that its managers use this lighthouse unchanged.

A follower passes calls on to the leader and, when the leader changes meanwhile, to the next one,
until the client's own deadline. So a torchft client may know any of the lighthouses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Protocol

import grpc

from ftcore.base.log import event
from ftcore.wire.messages import show_id
from lighthouse import torchft_pb2 as pb
from lighthouse.lease import LeaseLost, LeaseUnreachable
from lighthouse.lease.api import Clock, Holder, monotonic_s
from lighthouse.torchft_quorum import TorchftCore, TorchftMember, TorchftPolicy, TorchftQuorum

log = logging.getLogger(__name__)
JOB = "torchft"
QUORUM, HEARTBEAT = "/torchft.LighthouseService/Quorum", "/torchft.LighthouseService/Heartbeat"
ID_CHARS_MAX = 512
GROUPS_MAX = 20_000
RETRY_S = 0.05


class Writer(Protocol):
    """What a leader's tenure offers (`lighthouse.election.Tenure`)."""

    term: int
    records: dict[str, bytes]

    def is_valid(self) -> bool: ...
    async def write(self, job: str, record: bytes | None) -> None: ...


class TorchftService(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The two calls of torchft's LighthouseService. Leads inside `leading`, else passes on."""

    def __init__(
        self,
        policy: TorchftPolicy,
        *,
        holder: Callable[[], Holder | None],
        connect: Callable[[str], grpc.aio.Channel] = grpc.aio.insecure_channel,
        clock: Clock = monotonic_s,
    ) -> None:
        self.policy = policy
        self.core: TorchftCore | None = None
        self._tenure: Writer | None = None
        self._holder, self._connect, self._clock = holder, connect, clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._answers: dict[str, asyncio.Future[bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()  # records must reach the store in order
        self._durable_id = 0

    def service(self, details: Any) -> Any:
        """grpc asks here for the handler of a path. Messages stay bytes: one reply goes to many."""
        return {
            QUORUM: grpc.unary_unary_rpc_method_handler(self._quorum),
            HEARTBEAT: grpc.unary_unary_rpc_method_handler(self._heartbeat),
        }.get(details.method)

    @asynccontextmanager
    async def leading(self, tenure: Writer) -> AsyncIterator[TorchftCore]:
        """Answer calls ourselves inside the `with`. Who still waits at its end asks the next."""
        previous = parse_record(tenure.records.get(JOB))
        now = self._clock()
        self.core = TorchftCore(self.policy, term=tenure.term, previous=previous, now=now)
        self._tenure, self._durable_id = tenure, previous.quorum_id if previous else 0
        try:
            yield self.core
        finally:
            self.core = self._tenure = None
            if self._timer is not None:
                self._timer.cancel()
            answers, self._answers = self._answers, {}
            _fail(answers.values(), LeaseLost("this lighthouse leads no more"))
            for task in self._tasks:
                task.cancel()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(grace=None)

    async def kill(self, replica_id: str, message: str) -> str:
        """Ask a member's manager to exit. Returns what went wrong, or nothing."""
        previous = self.core.previous if self.core else None
        addresses = {m.replica_id: m.address for m in (previous.members if previous else ())}
        if replica_id not in addresses:
            return f"{replica_id} is not in the quorum"
        target = addresses[replica_id].removeprefix("http://")
        async with grpc.aio.insecure_channel(target) as channel:
            method = _unary(channel, "/torchft.ManagerService/Kill")
            try:
                await method(pb.KillRequest(msg=message).SerializeToString(), timeout=10)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # it died before it answered
                    return f"{replica_id} did not obey: {error.details()}"
        return ""

    # The two calls

    async def _heartbeat(self, request: bytes, context: Any) -> bytes:
        message = await self._parse(pb.LighthouseHeartbeatRequest, request, context)
        if self.core is None:
            return await self._pass_on(HEARTBEAT, request, context)
        await self._require_room(message.replica_id, context)
        self.core.heartbeat(message.replica_id, self._clock())
        self._set_timer()
        return b""

    async def _quorum(self, request: bytes, context: Any) -> bytes:
        message = await self._parse(pb.LighthouseQuorumRequest, request, context)
        while self.core is not None:
            await self._require_room(message.requester.replica_id, context)
            try:
                return await self._ask(member_of(message.requester))
            except (LeaseLost, LeaseUnreachable):
                await asyncio.sleep(RETRY_S)  # somebody else leads now, or will soon
        return await self._pass_on(QUORUM, request, context)

    async def _ask(self, member: TorchftMember) -> bytes:
        core, asked_at = self.core, self._clock()
        assert core is not None
        older = self._answers.get(member.replica_id)
        answer = asyncio.get_running_loop().create_future()
        self._answers[member.replica_id] = answer
        if older is not None and not older.done():
            answer.add_done_callback(lambda _: _copy(answer, older))
        core.ask(member, asked_at)
        self._turn()
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if self._answers.get(member.replica_id) is answer:
                del self._answers[member.replica_id]
                core.withdraw(member.replica_id, at=asked_at)
            raise

    def _turn(self) -> None:
        """Decide; if there is a quorum, make it durable, then answer."""
        core, tenure = self.core, self._tenure
        if core is None or tenure is None:
            return
        quorum = core.poll(self._clock())
        self._set_timer()
        if quorum is None:
            return
        waiting = [self._answers.pop(r) for r in quorum.replica_ids if r in self._answers]
        task = asyncio.create_task(self._answer(quorum, waiting, tenure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, quorum: TorchftQuorum, answers: list[asyncio.Future[bytes]], tenure: Writer
    ) -> None:
        try:
            await self._make_durable(quorum, tenure)
            if not tenure.is_valid():
                raise LeaseLost("this lighthouse leads no more")
        except (LeaseLost, LeaseUnreachable) as error:
            _fail(answers, error)
            return
        reply = reply_of(quorum)
        for answer in answers:
            if not answer.done():
                answer.set_result(reply)

    async def _make_durable(self, quorum: TorchftQuorum, tenure: Writer) -> None:
        async with self._writing:
            if quorum.quorum_id > self._durable_id:
                await tenure.write(JOB, record_of(quorum))
                self._durable_id = quorum.quorum_id
                members = ", ".join(quorum.replica_ids)
                event(log, "torchft.quorum", id=show_id(quorum.quorum_id), members=members)

    def _set_timer(self) -> None:
        core = self.core
        if core is None or (self._timer is not None and not self._timer.cancelled()):
            return
        wait_s = min(core.wake_at - self._clock(), core.policy.heartbeat_timeout_s)
        self._timer = asyncio.get_running_loop().call_later(max(0.001, wait_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        core = self.core
        if core is not None:
            core.wake_at = min(core.wake_at, self._clock())  # forget the silent even if nobody asks
            self._turn()

    async def _require_room(self, replica_id: str, context: Any) -> None:
        core = self.core
        if core is None or replica_id in core.expiries or len(core.expiries) < GROUPS_MAX:
            return
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many replica groups")

    async def _parse(self, kind: Any, request: bytes, context: Any) -> Any:
        try:
            message = kind.FromString(request)
        except Exception as error:  # protobuf's DecodeError has no public home across versions
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a message: {error}")
        member = message.requester if kind is pb.LighthouseQuorumRequest else message
        if not 0 < len(member.replica_id) <= ID_CHARS_MAX:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "replica_id is empty or too long")
        return message

    # Followers

    async def _pass_on(self, path: str, request: bytes, context: Any) -> bytes:
        """Ask whoever leads, again and again while the client waits."""
        deadline = self._clock() + (context.time_remaining() or 60.0)
        while self._clock() < deadline:
            if self.core is not None:
                handler = self._quorum if path == QUORUM else self._heartbeat
                return await handler(request, context)
            holder = self._holder()
            if holder is not None and holder.address:
                try:
                    timeout_s = deadline - self._clock()
                    method = _unary(self._channel(holder.address), path)
                    reply: bytes = await method(request, timeout=timeout_s)
                    return reply
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        await context.abort(error.code(), error.details() or "")
            await asyncio.sleep(RETRY_S)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no lighthouse leads at present")
        raise AssertionError("abort raises")

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return self._channels[address]


def _unary(channel: Any, path: str) -> Any:
    """A call whose messages are bytes. The public stubs of grpc.aio do not know that this works."""
    return channel.unary_unary(path)


def _fail(answers: Iterable[asyncio.Future[bytes]], error: Exception) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)
            answer.exception()  # whoever waited may have hung up: that is no error


def _copy(source: asyncio.Future[bytes], target: asyncio.Future[bytes]) -> None:
    """A group that asked twice on two connections gets the same answer on both."""
    if target.done():
        return
    if source.cancelled():
        target.cancel()
    elif error := source.exception():
        target.set_exception(error)
    else:
        target.set_result(source.result())


def member_of(message: pb.QuorumMember) -> TorchftMember:
    return TorchftMember(
        replica_id=message.replica_id,
        address=message.address,
        store_address=message.store_address,
        step=message.step,
        world_size=message.world_size,
        shrink_only=message.shrink_only,
        commit_failures=message.commit_failures,
        data=message.data,
    )


def reply_of(quorum: TorchftQuorum) -> bytes:
    """The reply that every member gets, serialized once."""
    members = [pb.QuorumMember(**asdict(m)) for m in quorum.members]
    content = pb.Quorum(quorum_id=quorum.quorum_id, participants=members)
    content.created.seconds = int(time.time())
    return pb.LighthouseQuorumResponse(quorum=content).SerializeToString()


def record_of(quorum: TorchftQuorum) -> bytes:
    """What the next leader must know."""
    members = [asdict(m) for m in quorum.members]
    return json.dumps({"quorum_id": quorum.quorum_id, "members": members}).encode()


def parse_record(record: bytes | None) -> TorchftQuorum | None:
    if not record:
        return None
    content = json.loads(record)
    members = tuple(TorchftMember(**m) for m in content["members"])
    return TorchftQuorum(quorum_id=content["quorum_id"], members=members)
