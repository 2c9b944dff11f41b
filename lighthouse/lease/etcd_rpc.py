"""Call one of several etcd endpoints: when one is dead, silent or cut off, ask the next."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from lighthouse.lease import etcd_pb2 as pb
from lighthouse.lease.api import Clock
from lighthouse.lease.errors import LeaseUnreachable

Reply = TypeVar("Reply", bound=Message)
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)
PASSING = {
    grpc.StatusCode.UNAVAILABLE,  # dead, or it has no leader
    grpc.StatusCode.DEADLINE_EXCEEDED,  # stopped, or cut off from its majority
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # its disk quota is used up
}


class EtcdRpc:
    """The endpoints of one etcd cluster. Stays with one that answers."""

    def __init__(self, endpoints: Sequence[str], *, try_timeout_s: float, clock: Clock) -> None:
        self._endpoints = tuple(endpoints)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._try_timeout_s, self._clock = try_timeout_s, clock
        self._current = 0

    async def call(
        self, path: str, request: Message, reply: type[Reply], *, timeout_s: float
    ) -> Reply:
        """Answer of the first endpoint that answers. Raises LeaseUnreachable after `timeout_s`.

        A call may then still take effect later, so every write carries a comparison.
        """
        deadline = self._clock() + timeout_s
        why = "no time left"
        while (left_s := deadline - self._clock()) > 0:
            method = self._channel().unary_unary(
                path,
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=reply.FromString,
            )
            try:
                answer = await method(request, timeout=min(left_s, self._try_timeout_s))
                return cast(Reply, answer)
            except grpc.aio.AioRpcError as error:
                why = self._rotate(error)
                await asyncio.sleep(min(0.02, left_s))  # a refused connection costs no time
        raise self._unreachable(path, why)

    async def keep_alive(self, lease_id: int, *, timeout_s: float) -> int:
        """Renew a lease once. Returns its time to live in seconds, 0 or less when it has ended."""
        deadline = self._clock() + timeout_s
        path, why = "/etcdserverpb.Lease/LeaseKeepAlive", "no time left"
        while (left_s := deadline - self._clock()) > 0:
            reply = pb.LeaseKeepAliveResponse
            stream = self._open(path, reply, timeout_s=min(left_s, self._try_timeout_s))
            try:
                await stream.write(pb.LeaseKeepAliveRequest(ID=lease_id))
                answer = await stream.read()
                if isinstance(answer, reply):
                    return int(answer.TTL)
                why = "the stream ended"
            except grpc.aio.AioRpcError as error:
                why = self._rotate(error)
                await asyncio.sleep(min(0.02, left_s))
            finally:
                stream.cancel()
        raise self._unreachable(path, why)

    async def wait_event(self, key: bytes, *, start_revision: int, timeout_s: float) -> None:
        """Return when `key` may have changed since `start_revision`, or after `timeout_s`."""
        request = pb.WatchCreateRequest(key=key, start_revision=start_revision)
        path = "/etcdserverpb.Watch/Watch"
        stream = self._open(path, pb.WatchResponse, timeout_s=timeout_s)
        try:
            await stream.write(pb.WatchRequest(create_request=request))
            async for answer in stream:
                if answer.events or answer.canceled:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._rotate(error)
                await asyncio.sleep(min(0.02, timeout_s))
        finally:
            stream.cancel()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(grace=None)

    def _channel(self) -> grpc.aio.Channel:
        endpoint = self._endpoints[self._current % len(self._endpoints)]
        if endpoint not in self._channels:
            self._channels[endpoint] = _connect(endpoint)
        return self._channels[endpoint]

    def _open(self, path: str, reply: type[Message], *, timeout_s: float) -> Any:
        """A stream of requests and replies. Typed Any: the public stubs of grpc.aio are wrong."""
        method: Any = self._channel().stream_stream(
            path,
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        return method(timeout=timeout_s)

    def _rotate(self, error: grpc.aio.AioRpcError) -> str:
        """Go to the next endpoint, or raise what asking elsewhere cannot help."""
        why = f"{self._endpoints[self._current % len(self._endpoints)]}: {error.details()}"
        if error.code() not in PASSING:
            raise LeaseUnreachable(f"etcd refused: {why}", code=error.code().name) from error
        self._current += 1
        return why

    def _unreachable(self, path: str, why: str) -> LeaseUnreachable:
        what = f"no etcd endpoint answered {path.rsplit('/', 1)[1]}; the last one, {why}"
        return LeaseUnreachable(what, endpoints=",".join(self._endpoints))


def _connect(endpoint: str) -> grpc.aio.Channel:
    """`http://` or nothing is plain text; `https://` uses etcdctl's variables for certificates."""
    scheme, _, address = endpoint.rpartition("://")
    if scheme != "https":
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read_env("ETCDCTL_CACERT"),
        private_key=_read_env("ETCDCTL_KEY"),
        certificate_chain=_read_env("ETCDCTL_CERT"),
    )
    return grpc.aio.secure_channel(address, credentials, options=OPTIONS)


def _read_env(name: str) -> bytes | None:
    path: Any = os.environ.get(name)
    return Path(path).read_bytes() if path else None
