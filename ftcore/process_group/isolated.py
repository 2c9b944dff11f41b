"""A group that lives in a child process: abort() kills it, whatever its backend is stuck in.

For backends or drivers whose own abort cannot be trusted. It costs two copies through shared
memory and two messages a collective. Children are forked from a nursery that has imported torch.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from ftcore.process_group.arena import Arena, Region
from ftcore.process_group.base import Group, Quorum
from ftcore.process_group.isolated_child import MESSAGE_BYTES_MAX
from ftcore.process_group.isolated_codec import (
    OPERATIONS,
    READS_FIRST,
    WRITES_NOTHING,
    dtype_name,
    encode,
)
from ftcore.process_group.nursery import start_child, warm_up

Placed = tuple[torch.Tensor, torch.Tensor, Region]  # the caller's tensor and its twin in the arena
_GONE = "the process of the group ended"


class _RemoteWork:
    """A collective in the child. wait() copies its results out of the shared memory."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._error = ""
        self._lock = threading.Lock()
        self._finish: Callable[[], None] | None = finish

    def end(self, error: str) -> None:
        self._error = self._error or error
        self._ended.set()

    def wait(self) -> bool:
        self._ended.wait()
        if self._error:
            raise RuntimeError(self._error)
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def result(self) -> list[torch.Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class _Child:
    """A child process, and the thread that hears what ended there."""

    def __init__(self, interface: str) -> None:
        self._process = start_child(interface)
        self._channel = self._process.channel
        self._lock = threading.Lock()
        self._waiting: dict[int, _RemoteWork] = {}
        self._gone = ""
        self._reader = threading.Thread(target=self._hear, name="ftcore-isolated", daemon=True)
        self._reader.start()

    def send(
        self, message: dict[str, Any], *, work: _RemoteWork | None = None, fd: int = -1
    ) -> None:
        raw = json.dumps(message).encode()
        with self._lock:
            if work is not None:
                self._waiting[message["id"]] = work
            if self._gone:
                raise RuntimeError(self._gone)
            try:
                socket.send_fds(self._channel, [raw], [fd] if fd >= 0 else [])
            except OSError as error:
                raise RuntimeError(f"{_GONE}: {error.strerror}") from error

    def kill(self) -> None:
        """Returns at once; whoever waits gets an error at once."""
        self._process.kill()
        self._end_all(_GONE)

    def _hear(self) -> None:
        while raw := self._receive():
            message = json.loads(raw)
            with self._lock:
                work = self._waiting.pop(message["id"], None)
            if work is not None:
                work.end(message["error"])
        self._end_all(_GONE)
        self._process.close()

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(MESSAGE_BYTES_MAX)
        except OSError:
            return b""

    def _end_all(self, why: str) -> None:
        with self._lock:
            self._gone = self._gone or why
            waiting, self._waiting = list(self._waiting.values()), {}
        for work in waiting:
            work.end(self._gone)


class _RemoteBackend:
    """Looks like a torch Backend; each call is sent to the child."""

    def __init__(self, child: _Child, quorum: Quorum) -> None:
        """Blocks until the child's group is built. Raises RuntimeError."""
        self._child, self._arena = child, Arena()
        self._lock = threading.Lock()
        self._number = 0
        work = _RemoteWork(lambda: None)
        settings = {name: getattr(quorum, name) for name in Quorum.__slots__}
        child.send({"id": 0, "configure": settings}, work=work)
        work.wait()

    def __getattr__(self, operation: str) -> Callable[..., _RemoteWork]:
        if operation not in OPERATIONS:
            raise AttributeError(operation)
        return lambda *arguments: self._call(operation, arguments)

    def _call(self, operation: str, arguments: tuple[Any, ...]) -> _RemoteWork:
        """Messages leave in the order of calls: all members must issue alike."""
        with self._lock:
            self._number += 1
            placed: list[Placed] = []
            encoded = [
                encode(argument, self._placer(placed, copy=i > 0 or operation in READS_FIRST))
                for i, argument in enumerate(arguments)
            ]
            first = len(_tensors_in(arguments[0])) if operation not in WRITES_NOTHING else 0
            work = _RemoteWork(lambda: self._copy_out(placed, first))
            message = {"id": self._number, "call": operation, "arguments": encoded}
            self._child.send(message, work=work)
            return work

    def _placer(self, placed: list[Placed], *, copy: bool) -> Callable[[torch.Tensor], list[Any]]:
        def place(tensor: torch.Tensor) -> list[Any]:
            region, new = self._arena.take(tensor.numel() * tensor.element_size())
            if new is not None:
                self._child.send({}, fd=new.fd)
                new.close_fd()
            segment = self._arena.segments[region.segment]
            shared = segment.tensor(region.offset, tensor.dtype, list(tensor.shape))
            if copy:
                shared.copy_(tensor.detach())
            placed.append((tensor, shared, region))
            return [region.segment, region.offset, dtype_name(tensor.dtype), list(tensor.shape)]

        return place

    def _copy_out(self, placed: list[Placed], first: int) -> None:
        with torch.no_grad():
            for tensor, shared, _ in placed[:first]:
                tensor.copy_(shared)
        for _, _, region in placed:
            self._arena.give_back(region)


class _IsolatedLink:
    def __init__(self, backend: _RemoteBackend, child: _Child) -> None:
        self.backend: object = backend
        self._child = child

    def cut(self) -> None:
        self._child.kill()


class IsolatedGroup(Group):
    """A gloo group in a process of its own. Killing that process is its abort."""

    backend_name = "isolated"

    def __init__(self, *, interface: str = "127.0.0.1", hold_errors: bool = False) -> None:
        super().__init__(hold_errors=hold_errors)
        self._interface = interface
        warm_up()

    def _connect(self, quorum: Quorum) -> _IsolatedLink:
        child = _Child(self._interface)
        try:
            return _IsolatedLink(_RemoteBackend(child, quorum), child)
        except RuntimeError:
            child.kill()
            raise


def _tensors_in(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for item in argument for tensor in _tensors_in(item)]
    return []
