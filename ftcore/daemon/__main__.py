"""Run the manager of one replica group: `python -m ftcore.daemon CONFIG_JSON`.

Started by group rank 0. It prints the address of its socket, serves its ranks, keeps the stream to
the lighthouse, and ends with its ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys

from ftcore.base.log import configure_logging, event
from ftcore.base.machine import this_machine
from ftcore.daemon.group import Config, Group
from ftcore.daemon.hang import HangWatch
from ftcore.daemon.uplink import LighthouseUnreachable, Uplink
from ftcore.daemon.watch import ProcessWatch, watch_stopped
from ftcore.wire.codec import encode_report
from ftcore.wire.frames import FrameProtocol

log = logging.getLogger("ftcore.daemon")


async def run(config: Config, parent_pid: int) -> None:
    group = Group(config)
    uplink = Uplink(
        config.endpoints,
        hello=group.hello_bytes,
        report=group.report_bytes,
        news=group.news_bytes,
        order=group.order,
    )
    watch = ProcessWatch(died=group.rank_died)
    group.poke = uplink.poke
    servers = await _listen(group)
    watch.add(parent_pid)
    tasks = [
        asyncio.create_task(_reach_lighthouse(group, uplink, watch, config.attach_timeout_s)),
        asyncio.create_task(_watch_parent(group, parent_pid)),
        asyncio.create_task(
            watch_stopped(
                lambda: watch.pids, limit_s=config.stopped_limit_s, stopped=group.rank_stopped
            )
        ),
    ]
    if config.hang_after_s > 0:
        tasks.append(asyncio.create_task(HangWatch(group, after_s=config.hang_after_s).run()))
    await group.ended.wait()
    if group.core is not None:
        await uplink.say_last(encode_report(group.core.report()))
    if group.condemned is not None:  # last: the lighthouse should hear the reason, not the echo
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.condemned, signal.SIGKILL)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    watch.close()
    for server in servers:
        server.close()
    await asyncio.sleep(0.05)  # let the last words to the ranks leave


async def _listen(group: Group) -> list[asyncio.Server]:
    """Listen on an abstract unix socket, which leaves no file behind however this process ends,
    and over TCP when ranks may be on other machines. Print where."""
    loop, config = asyncio.get_running_loop(), group.config

    def connection() -> FrameProtocol:
        return FrameProtocol(group.received, group.closed, silent_limit_s=config.stopped_limit_s)

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"\0ftcore-{os.getpid()}-{config.incarnation}"
    sock.bind(name)
    servers = [await loop.create_unix_server(connection, sock=sock)]
    tcp = ""
    if config.listen_host:
        servers.append(await loop.create_server(connection, config.listen_host, 0))
        host, port = servers[1].sockets[0].getsockname()[:2]
        tcp = f"{host}:{port}"
    print(json.dumps({"unix": name[1:], "tcp": tcp}), flush=True)
    return servers


async def _reach_lighthouse(
    group: Group, uplink: Uplink, watch: ProcessWatch, timeout_s: float
) -> None:
    await group.introduced.wait()
    for rank in group.ranks.values():
        if rank.hello.machine == this_machine():
            watch.add(rank.hello.pid)
    holding = asyncio.create_task(uplink.run())
    try:
        try:
            await uplink.wait_attached(timeout_s)
        except LighthouseUnreachable as error:
            group.stop(str(error), error.remedy)
        await holding
    finally:
        holding.cancel()


async def _watch_parent(group: Group, parent_pid: int) -> None:
    """A trainer that dies before it says hello takes this process with it."""
    while not group.introduced.is_set():
        await asyncio.sleep(0.2)
        if os.getppid() != parent_pid:
            group.end("the trainer ended before it was ready", is_clean=True)
            return


def main() -> None:
    config = json.loads(sys.argv[1])
    level = config.pop("log_level", "WARNING")
    parent_pid = config.pop("parent_pid")
    config["endpoints"] = tuple(config["endpoints"])
    configure_logging(level="WARNING")
    logging.getLogger("ftcore").setLevel(level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer; we end with it
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(Config(**config), parent_pid))
    event(log, "manager.ended", level=logging.DEBUG)


if __name__ == "__main__":
    main()
