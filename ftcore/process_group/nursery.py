"""A process that has imported torch and forks the children of isolated groups, in milliseconds.

It never starts a thread or a group itself, so forking it is safe. It ends when this process does:
its channel closes then, and so do its children's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

_REPLY_BYTES_MAX = 4096
_lock = threading.Lock()
_channel: socket.socket | None = None


class ChildProcess:
    """One child, reached by `channel` and killed by a pidfd, which cannot hit another process."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.channel = channel
        self._pidfd_lock = threading.Lock()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._pidfd_lock, suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        self.channel.close()
        with self._pidfd_lock:
            pidfd, self._pidfd = self._pidfd, -1
            if pidfd >= 0:
                os.close(pidfd)


def warm_up() -> None:
    """Start the nursery, so that the first group does not wait for its imports."""
    with _lock:
        _nursery()


def start_child(interface: str) -> ChildProcess:
    """Fork a child that serves a group on `interface`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _lock, theirs:
        nursery = _nursery()
        try:
            pid = _fork_in(nursery, interface, theirs)
        except OSError:  # somebody killed it: one more try with a new one
            _forget()
            pid = _fork_in(_nursery(), interface, theirs)
    return ChildProcess(ours, pid)


def _fork_in(nursery: socket.socket, interface: str, channel: socket.socket) -> int:
    request = json.dumps({"interface": interface}).encode()
    socket.send_fds(nursery, [request], [channel.fileno()])
    reply = nursery.recv(_REPLY_BYTES_MAX)
    if not reply:
        raise BrokenPipeError("the nursery ended")
    return int(json.loads(reply)["pid"])


def _nursery() -> socket.socket:
    global _channel
    if _channel is None:
        _channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            module = f"{__package__}.isolated_child"
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            subprocess.Popen(command, pass_fds=[theirs.fileno()])
    return _channel


def _forget() -> None:
    global _channel
    if _channel is not None:
        _channel.close()
        _channel = None
