"""Messages between a trainer and the daemon of its host: JSON frames on a Unix socket, with file
descriptors beside them. Nothing is pickled."""

from __future__ import annotations

import array
import json
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

PROTOCOL = 2
Message = dict[str, Any]
_HEADER = struct.Struct("<IB")
_FDS_MAX = 64
# A layout of 20,000 tensors is 2 MB; a message beyond this is not from us.
MESSAGE_BYTES_MAX = 1 << 30


class Channel:
    """One end of a connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message. When this returns the kernel has it, whatever becomes of us."""
        body = json.dumps(message, separators=(",", ":")).encode()
        header = _HEADER.pack(len(body), len(fds))
        if not fds:
            with self._sending:
                self._socket.sendall(header + body)
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with self._sending:
            sent = self._socket.sendmsg([header], rights)
            self._socket.sendall(header[sent:] + body)

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors, or None when the other end is gone."""
        try:
            header, fds = self._receive_header()
            if header is None:
                return None
            size, fd_count = _HEADER.unpack(header)
            if size > MESSAGE_BYTES_MAX or fd_count != len(fds):
                raise ConnectionError(f"message of {size} bytes with {len(fds)} descriptors")
            return json.loads(self._receive_exactly(size)), fds
        except OSError:  # closed on either end
            return None

    def send_bytes(self, message: Message, data: memoryview) -> None:
        """Send one message and raw bytes right behind it; the receiver knows how many."""
        body = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._socket.sendall(_HEADER.pack(len(body), 0) + body)
            self._socket.sendall(data)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with raw bytes that were announced. Raises OSError when they do not come."""
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionError("the other end closed in mid-message")
            view = view[count:]

    def finish(self) -> None:
        """Say that nothing more is sent; the other end may still answer."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        """Wake a blocked `receive` on both ends and give the socket back."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _receive_header(self) -> tuple[bytes | None, list[int]]:
        space = socket.CMSG_SPACE(_FDS_MAX * 4)
        fds: list[int] = []
        header = b""
        while len(header) < _HEADER.size:
            part, rights, _, _ = self._socket.recvmsg(_HEADER.size - len(header), space)
            for _, _, data in rights:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                fds += list(found)
            if not part:
                return None, fds
            header += part
        return header, fds

    def _receive_exactly(self, size: int) -> bytearray:
        body = bytearray(size)
        self.receive_into(memoryview(body))
        return body


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel says."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", packed)[1]
    return uid
