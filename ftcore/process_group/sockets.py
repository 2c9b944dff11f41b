"""Find the TCP sockets of one gloo group among all of this process, and cut them.

Gloo has no abort: a collective with a stopped peer blocks until its time limit. Shutting its
sockets down ends it in about a millisecond, here and on every peer. A socket counts as ours only
when one end is the port that this group's gloo device listens on, or a peer's device does; it is
remembered by inode, so that a file descriptor that was closed and given out again is never cut.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

Address = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SocketId:
    fd: int
    inode: int


def _all_sockets() -> Iterator[SocketId]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            info = os.fstat(int(name))
            if stat.S_ISSOCK(info.st_mode):
                yield SocketId(fd=int(name), inode=info.st_ino)


def _borrow(wanted: SocketId) -> socket.socket | None:
    """Return a duplicate of the socket, or None when it is gone."""
    try:
        copy = socket.socket(fileno=os.dup(wanted.fd))
    except OSError:
        return None
    if os.fstat(copy.fileno()).st_ino == wanted.inode:
        return copy
    copy.close()
    return None


def _ask(wanted: SocketId, question: Callable[[socket.socket], T]) -> T | None:
    if (copy := _borrow(wanted)) is None:
        return None
    with copy:
        try:
            return question(copy)
        except OSError:
            return None


def _is_inet(copy: socket.socket) -> bool:
    return copy.family in (socket.AF_INET, socket.AF_INET6)


def _listening_at(copy: socket.socket) -> Address | None:
    listens = _is_inet(copy) and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return copy.getsockname()[:2] if listens else None


def _ends(copy: socket.socket) -> tuple[Address, Address] | None:
    return (copy.getsockname()[:2], copy.getpeername()[:2]) if _is_inet(copy) else None


def listener_made_by(make: Callable[[], T]) -> tuple[T, Address]:
    """Call `make`, which opens one listening socket, and return its result and its address.

    When another thread opened one at the same time, nobody can tell which is which: try again.
    """
    for _ in range(20):
        before = set(_all_sockets())
        made = make()
        new = [_ask(found, _listening_at) for found in set(_all_sockets()) - before]
        addresses = [address for address in new if address is not None]
        if len(addresses) == 1:
            return made, addresses[0]
    raise RuntimeError("20 gloo devices were made and none could be told from other listeners")


def connected_with(mine: Address, peers: set[Address]) -> tuple[SocketId, ...]:
    """Return the sockets accepted at `mine` or connected to one of `peers`."""
    found = []
    for candidate in _all_sockets():
        ends = _ask(candidate, _ends)
        if ends and (ends[0] == mine or ends[1] in peers):
            found.append(candidate)
    return tuple(found)


def cut(sockets: tuple[SocketId, ...]) -> None:
    """Shut the sockets down, both ways. Whoever waits on them, here or at a peer, gets an error."""
    for wanted in sockets:
        _ask(wanted, lambda copy: copy.shutdown(socket.SHUT_RDWR))
