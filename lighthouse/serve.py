"""Put a lighthouse on its ports and keep it there until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from ftcore.base.errors import BadSetting
from ftcore.base.log import event
from lighthouse.errors import AddressInUse
from lighthouse.quorum import Policy
from lighthouse.records import Records
from lighthouse.server import Lighthouse, make_grpc_server
from lighthouse.web import make_app

log = logging.getLogger("lighthouse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A lighthouse on its ports. Addresses are `host:port`."""

    lighthouse: Lighthouse
    address: str
    http_address: str


@asynccontextmanager
async def serving(
    policy: Policy, records: Records, *, bind: str, http_bind: str
) -> AsyncIterator[Serving]:
    """Serve managers on `bind` and people on `http_bind`; port 0 takes a free one."""
    host, _ = split_bind(bind)
    http_host, http_port = split_bind(http_bind)
    lighthouse = Lighthouse(policy, records, clock=time.monotonic)
    server = make_grpc_server(lighthouse)
    runner = web.AppRunner(make_app(lighthouse), access_log=None)
    try:
        try:
            port = server.add_insecure_port(bind)
        except RuntimeError as error:
            raise AddressInUse(f"{bind} cannot be listened on: it is in use", bind=bind) from error
        await runner.setup()
        site = web.TCPSite(runner, http_host, http_port)
        try:
            await site.start()
        except OSError as error:
            raise AddressInUse(
                f"{http_bind} cannot be listened on: {error.strerror}", bind=http_bind
            ) from error
        await server.start()
        http_port = runner.addresses[0][1]
        yield Serving(
            lighthouse=lighthouse, address=f"{host}:{port}", http_address=f"{http_host}:{http_port}"
        )
    finally:
        lighthouse.close()
        await server.stop(grace=0.1)
        await runner.cleanup()


async def serve_until_told(
    policy: Policy,
    records: Records,
    *,
    bind: str,
    http_bind: str,
    ready: Callable[[Serving], None],
) -> None:
    """Serve until SIGTERM or SIGINT, or until nothing more can be made durable."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with serving(policy, records, bind=bind, http_bind=http_bind) as place:
        ready(place)
        event(log, "lighthouse.started", address=place.address, term=records.term)
        failed = place.lighthouse.failed
        failed.add_done_callback(lambda _: told.set())
        await told.wait()
        if failed.done():
            raise failed.result()


def split_bind(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadSetting(f"{bind!r} is not HOST:PORT")
    return host, int(port)
