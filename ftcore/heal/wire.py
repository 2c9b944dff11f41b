"""Frames of the heal protocol: a length and a JSON object, raw bytes, a checksum.

A reader says hello (version, token, quorum id, step), then asks for the manifest, for parts, and
says when it is done. Each answer is a frame; where it announces bytes, they follow, and after them
eight bytes of XXH3-64. Nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import xxhash

from ftcore.heal.errors import FrameInvalid, SourceLost
from ftcore.heal.parts import window

VERSION = 1
FRAME_BYTES_MAX = 64 << 10
RECEIVE_BYTES = 1 << 20  # one system call and one checksum; fits the second-level cache
SEND_BYTES = 4 << 20  # larger, since after each the source may wait 5 ms for its trainer's Python:
# with a trainer that never leaves Python, 0.67 GB/s against 0.25 at 1 MiB on a busy machine
_LENGTH = struct.Struct(">I")
_CHECKSUM = struct.Struct(">Q")


def set_timeouts(connection: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Let the kernel end a send or receive in which nothing moves for so long.

    Python's own time-outs make the socket non-blocking, so that each call moves little and takes
    the interpreter lock twice; a training thread would slow the transfer to a crawl.
    """
    connection.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        whole = int(seconds)
        value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def shut(connection: socket.socket) -> None:
    """End a connection under whoever waits on it."""
    with suppress(OSError):  # it is closed already, or never was connected
        connection.shutdown(socket.SHUT_RDWR)


def send_frame(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    assert len(data) <= FRAME_BYTES_MAX, "a frame is too large for its reader"
    send_all(connection, _LENGTH.pack(len(data)) + data)


def receive_frame(connection: socket.socket) -> dict[str, Any]:
    """The next frame. Raises SourceLost at the end of the stream, FrameInvalid for other bytes."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > FRAME_BYTES_MAX:
        raise FrameInvalid(f"a frame of {length} bytes is more than the limit of {FRAME_BYTES_MAX}")
    try:
        message = json.loads(receive_exactly(connection, length))
    except (ValueError, RecursionError) as error:
        raise FrameInvalid(f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameInvalid("a frame is not a JSON object")
    return message


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    receive_into(connection, [memoryview(data)], size)
    return bytes(data)


def receive_into(connection: socket.socket, views: Sequence[memoryview], size: int) -> int:
    """Fill `views` with exactly `size` bytes and return their checksum."""
    checksum = xxhash.xxh3_64()
    received = 0
    while received < size:
        pieces = window(views, received, RECEIVE_BYTES)
        count = _receive(connection, pieces)
        if count == 0:
            raise SourceLost(f"the connection ended {size - received} bytes early")
        received += count
        for piece in pieces:
            if count <= 0:
                break
            checksum.update(piece[:count])
            count -= len(piece)
    return checksum.intdigest()


def _receive(connection: socket.socket, pieces: Sequence[memoryview]) -> int:
    try:
        if len(pieces) == 1:
            return connection.recv_into(pieces[0], flags=socket.MSG_WAITALL)
        return connection.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]
    except BlockingIOError as error:
        raise SourceLost("the connection fell silent") from error
    except OSError as error:
        raise SourceLost(f"the connection broke: {error.strerror}") from error


def send_some(
    connection: socket.socket, views: Sequence[memoryview], *, start: int, checksum: Any
) -> int:
    """Send at most SEND_BYTES from `start` on and add them to the checksum; 0 if none would go."""
    pieces = window(views, start, SEND_BYTES)
    try:
        if len(pieces) == 1:
            count = left = connection.send(pieces[0])
        else:
            count = left = connection.sendmsg(pieces)
    except BlockingIOError:
        return 0
    for piece in pieces:
        checksum.update(piece[:left])
        left -= min(left, len(piece))
    return count


def send_all(connection: socket.socket, data: bytes, *, silent_s: float = 30.0) -> None:
    """Send all of `data`. Raises SourceLost when the other side takes nothing for `silent_s`."""
    view, moved_at = memoryview(data), time.monotonic()
    while view:
        try:
            view = view[connection.send(view) :]
            moved_at = time.monotonic()
        except BlockingIOError as error:
            if time.monotonic() - moved_at > silent_s:
                raise SourceLost(f"the other side took nothing for {silent_s} s") from error


def send_checksum(connection: socket.socket, checksum: int) -> None:
    send_all(connection, _CHECKSUM.pack(checksum))


def receive_checksum(connection: socket.socket) -> int:
    (checksum,) = _CHECKSUM.unpack(receive_exactly(connection, _CHECKSUM.size))
    return int(checksum)
