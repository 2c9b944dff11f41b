"""Notice at once when a process dies, and soon when it is stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

STOPPED_POLL_S = 0.1


class ProcessWatch:
    """Watches processes of this host by pidfd: a death is known without polling or timing out."""

    def __init__(self, *, died: Callable[[int], None]) -> None:
        self._died = died
        self._fds: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Watch `pid`; `died(pid)` is called once, also when it is dead already."""
        if pid in self._fds:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._died, pid)
            return
        self._fds[pid] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, pid)

    def _ended(self, pid: int) -> None:
        self._drop(pid)
        self._died(pid)

    def _drop(self, pid: int) -> None:
        fd = self._fds.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        for pid in list(self._fds):
            self._drop(pid)

    @property
    def pids(self) -> list[int]:
        return list(self._fds)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped this process (state T or t of proc(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


async def watch_stopped(
    pids: Callable[[], list[int]], *, limit_s: float, stopped: Callable[[int], None]
) -> None:
    """Call `stopped(pid)` for a process that is stopped for `limit_s` on end. Runs until cancelled.

    This looks at the process from outside, so a trainer that is only busy is never accused.
    """
    loop = asyncio.get_running_loop()
    since: dict[int, float] = {}
    while True:
        await asyncio.sleep(min(STOPPED_POLL_S, limit_s / 4))
        for pid in pids():
            if not is_stopped(pid):
                since.pop(pid, None)
            elif loop.time() - since.setdefault(pid, loop.time()) >= limit_s:
                stopped(pid)
