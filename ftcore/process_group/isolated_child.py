"""The child process of an isolated group: runs the collectives that its parent sends."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import torch

from ftcore.process_group.arena import Segment
from ftcore.process_group.base import Group
from ftcore.process_group.gloo import GlooGroup
from ftcore.process_group.isolated_codec import OPERATIONS, decode, dtype_of
from ftcore.process_group.work import GroupWork

MESSAGE_BYTES_MAX = 2**20


class Child:
    """Issues collectives in the order of their messages, reports their ends in the same order."""

    def __init__(self, channel: socket.socket, group: Group) -> None:
        self._channel, self._group = channel, group
        self._segments: list[Segment] = []
        self._issued: queue.SimpleQueue[tuple[int, GroupWork]] = queue.SimpleQueue()
        threading.Thread(target=self._report, daemon=True).start()

    def serve(self) -> None:
        """Until the parent closes the channel."""
        while True:
            raw, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES_MAX, 1)
            if not raw:
                return
            message = json.loads(raw)
            if fds:
                self._segments.append(Segment(fds[0], os.fstat(fds[0]).st_size))
                self._segments[-1].close_fd()
            elif "configure" in message:
                self._configure(message["configure"])
            else:
                self._issue(message)

    def _configure(self, quorum: dict[str, Any]) -> None:
        try:
            self._group.configure(**quorum)
            self._send(0, "")
        except Exception as error:
            self._send(0, str(error))

    def _issue(self, message: dict[str, Any]) -> None:
        operation = message["call"]
        if operation not in OPERATIONS:
            raise ValueError(f"{operation} is no collective")
        try:
            arguments = decode(message["arguments"], self._tensor)
            self._issued.put((message["id"], getattr(self._group, operation)(*arguments)))
        except Exception as error:
            self._send(message["id"], str(error))

    def _tensor(self, place: list[Any]) -> torch.Tensor:
        segment, offset, dtype, shape = place
        return self._segments[segment].tensor(offset, dtype_of(dtype), shape)

    def _report(self) -> None:
        while True:
            number, work = self._issued.get()
            try:
                work.wait()
                self._send(number, "")
            except Exception as error:
                self._send(number, str(error))

    def _send(self, number: int, error: str) -> None:
        self._channel.send(json.dumps({"id": number, "error": error}).encode())


def nurse(channel: socket.socket) -> None:
    """Fork a child for each descriptor that arrives, and say its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    while True:
        raw, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, 1)
        if not raw:
            return
        pid = os.fork()
        if pid == 0:
            channel.close()
            _live(socket.socket(fileno=fds[0]), json.loads(raw)["interface"])
        os.close(fds[0])
        channel.send(json.dumps({"pid": pid}).encode())


def _live(channel: socket.socket, interface: str) -> NoReturn:
    """Serve one group. No destructor runs at the end: it might wait for a stuck collective."""
    try:
        torch.set_num_threads(1)
        Child(channel, GlooGroup(interface=interface)).serve()
    finally:
        os._exit(0)


if __name__ == "__main__":
    nurse(socket.socket(fileno=int(sys.argv[1])))
