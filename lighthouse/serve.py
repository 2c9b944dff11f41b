"""Put a lighthouse on its port and keep it there until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from ftcore.base.errors import BadSetting
from ftcore.base.log import event
from lighthouse.election import Tenure
from lighthouse.errors import AddressInUse
from lighthouse.front import Front, FrontLimits, raise_open_files_limit
from lighthouse.host import Host
from lighthouse.lease import Lease, Timing
from lighthouse.lease.memory import MemoryLease, MemoryStore
from lighthouse.lease_records import LeaseRecords
from lighthouse.quorum import Policy
from lighthouse.records import Records
from lighthouse.security import TokenFile
from lighthouse.server import Lighthouse
from lighthouse.torchft_quorum import TorchftPolicy
from lighthouse.web import make_app

log = logging.getLogger("lighthouse")
FILES_PER_CONNECTION = 3  # outside, and both ends of the private socket
ALONE = Timing(ttl_s=86_400 * 365)  # there is nobody to yield to


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to listen, and who may speak. `advertise`: the address that others use for us."""

    bind: str = "127.0.0.1:0"
    http_bind: str = ""
    advertise: str = ""
    tls: ssl.SSLContext | None = None
    tokens: TokenFile | None = None
    limits: FrontLimits = field(default_factory=FrontLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A lighthouse on its ports. Addresses are `host:port`."""

    host: Host
    address: str
    http_address: str

    @property
    def lighthouse(self) -> Lighthouse:
        """What it leads with. Only while it leads."""
        assert self.host.lighthouse is not None, "this lighthouse follows"
        return self.host.lighthouse


@asynccontextmanager
async def serving(
    policy: Policy,
    records: Records | None = None,
    *,
    lease: Lease | None = None,
    bind: str = "",
    http_bind: str = "",
    place: Place | None = None,
    torchft: TorchftPolicy | None = None,
) -> AsyncIterator[Serving]:
    """Serve gRPC and HTTP on one port; port 0 takes a free one.

    Either `records` keeps the quorums of a lighthouse that is alone, or `lease` is shared with
    others and keeps them itself. Yields when it leads or knows who does.
    """
    place = place or Place(bind=bind, http_bind=http_bind)
    lease, make_records = _lease_and_records(lease, records)
    host = Host(
        policy, lease=lease, make_records=make_records, tokens=place.tokens, torchft=torchft
    )
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lighthouse-"))
        server = host.make_grpc_server()
        server.add_insecure_port(f"unix:{directory}/grpc.sock")
        await server.start()
        stack.push_async_callback(server.stop, grace=0.1)
        runner = web.AppRunner(make_app(host), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        front = Front(
            grpc_socket=f"{directory}/grpc.sock",
            http=lambda: runner.server(),  # type: ignore[misc]
            limits=_limits_of_this_process(place.limits),
        )
        address = await _listen(stack, front, place.bind, place.tls)
        http_address = address
        if place.http_bind:
            http_address = await _listen(stack, front, place.http_bind, place.tls)
        running = asyncio.create_task(host.run(place.advertise or _reachable(address)))
        stack.push_async_callback(_stop, host, running)
        await _leader_known(host, running, lease)
        yield Serving(host=host, address=address, http_address=http_address)


def _lease_and_records(
    lease: Lease | None, records: Records | None
) -> tuple[Lease, Callable[[Tenure], Records]]:
    if lease is not None:
        return lease, LeaseRecords
    assert records is not None, "a lighthouse without a lease needs records"
    store = MemoryStore(term=records.term - 1)
    return MemoryLease(store, timing=ALONE), lambda tenure: records


async def _listen(
    stack: AsyncExitStack, front: Front, bind: str, tls: ssl.SSLContext | None
) -> str:
    host, port = split_bind(bind)
    try:
        port = await stack.enter_async_context(front.listening(host, port, tls))
    except OSError as error:
        what = f"{bind} cannot be listened on: {error.strerror or error}"
        raise AddressInUse(what, bind=bind) from error
    return f"{host}:{port}"


async def _leader_known(host: Host, running: asyncio.Task[None], lease: Lease) -> None:
    """Wait for the first election, but not for a lease store that is away."""
    known = asyncio.create_task(host.changed.wait())
    await asyncio.wait((known, running), timeout=5, return_when=asyncio.FIRST_COMPLETED)
    known.cancel()
    if running.done():
        running.result()
    if host.holder is not None and host.holder.identity == lease.identity:
        while host.lighthouse is None and not running.done():
            await asyncio.sleep(0)


async def _stop(host: Host, running: asyncio.Task[None]) -> None:
    host.stop()
    await running


def _limits_of_this_process(limits: FrontLimits) -> FrontLimits:
    """No more connections than the system gives files for."""
    most = max(10, (raise_open_files_limit() - 100) // FILES_PER_CONNECTION)
    if most >= limits.connections_max:
        return limits
    event(log, "front.limited_by_open_files", connections_max=most)
    return FrontLimits(
        connections_max=most,
        first_bytes_timeout_s=limits.first_bytes_timeout_s,
        buffer_bytes=limits.buffer_bytes,
        stall_timeout_s=limits.stall_timeout_s,
        handshake_timeout_s=limits.handshake_timeout_s,
    )


async def serve_until_told(
    policy: Policy,
    records: Records | None,
    *,
    ready: Callable[[Serving], None],
    bind: str = "",
    http_bind: str = "",
    lease: Lease | None = None,
    place: Place | None = None,
    torchft: TorchftPolicy | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until nothing more can be made durable."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    place = place or Place(bind=bind, http_bind=http_bind)
    async with serving(policy, records, lease=lease, place=place, torchft=torchft) as serves:
        ready(serves)
        event(log, "lighthouse.started", address=serves.address)
        ended = asyncio.create_task(serves.host.ended())
        stopped = asyncio.create_task(told.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        ended.cancel()


def split_bind(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadSetting(f"{bind!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _reachable(address: str) -> str:
    """What to call ourselves when we listen on every address."""
    host, port = split_bind(address)
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
