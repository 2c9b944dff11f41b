"""Ask another group for the layout of its state, to name what differs: names and shapes only."""

from __future__ import annotations

import socket

from ftcore.heal import wire
from ftcore.heal.errors import FrameInvalid, SourceLost
from ftcore.statedict import Layout

LAYOUT_BYTES_MAX = 64 << 20


def send_layout(connection: socket.socket, layout: Layout | None) -> None:
    """Answer one who asks for a layout; that needs no token."""
    data = b"" if layout is None else layout.to_bytes()
    wire.send_frame(connection, {"bytes": len(data)})
    if data:
        wire.send_all(connection, data)


def fetch_layout(address: str, *, timeout_s: float = 5.0) -> Layout:
    """The layout that the heal server at `address` serves.

    Raises SourceLost, FrameInvalid, PlainEncodingInvalid or OSError.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
        wire.set_timeouts(connection, receive_s=timeout_s, send_s=timeout_s)
        wire.send_frame(connection, {"ftheal": wire.VERSION, "want": "layout"})
        size = wire.receive_frame(connection).get("bytes")
        if type(size) is not int or not 0 <= size <= LAYOUT_BYTES_MAX:
            raise FrameInvalid(f"a layout announces {size!r:.40} bytes")
        if size == 0:
            raise SourceLost(f"{address} has no layout to compare with")
        return Layout.from_bytes(wire.receive_exactly(connection, size))
