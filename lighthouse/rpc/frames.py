"""HTTP/2 on the wire (RFC 9113, RFC 7541): names, numbers, and the frames that a server builds."""

from __future__ import annotations

from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_MAX = 16_384  # the size that every peer has to take, and all that we take
WINDOW_MAX = 2**31 - 1
WINDOW_FIRST = 65_535

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
MAX_STREAMS, INITIAL_WINDOW, HEADER_LIST_MAX = 3, 4, 6

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0, 1, 3, 5
FRAME_SIZE_ERROR, REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 9, 11


class Http2Error(Exception):
    """The peer broke the protocol: the connection ends with `code`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
    return head + payload


def settings(values: dict[int, int]) -> bytes:
    content = (k.to_bytes(2, "big") + v.to_bytes(4, "big") for k, v in values.items())
    return frame(SETTINGS, 0, 0, b"".join(content))


def parse_settings(payload: bytes) -> Iterable[tuple[int, int]]:
    if len(payload) % 6:
        raise Http2Error(FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    for at in range(0, len(payload), 6):
        name, value = payload[at : at + 2], payload[at + 2 : at + 6]
        yield int.from_bytes(name, "big"), int.from_bytes(value, "big")


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def goaway(last_stream: int, code: int, why: str) -> bytes:
    text = why.encode()[:200]
    return frame(GOAWAY, 0, 0, last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + text)


def unpadded(flags: int, payload: bytes) -> bytes:
    """The content of a DATA or HEADERS frame, without padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload or payload[0] >= len(payload):
            raise Http2Error(PROTOCOL_ERROR, "more padding than payload")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(FRAME_SIZE_ERROR, "a frame is shorter than its own head")
    return payload[start:end] if start or end < len(payload) else payload


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """HPACK without a table and without Huffman codes: each pair as two literal strings."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)


def _string(text: str) -> bytes:
    data = text.encode("latin-1")
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    head, rest = bytearray((127,)), size - 127
    while rest >= 128:
        head.append(rest % 128 + 128)
        rest //= 128
    return bytes((*head, rest)) + data
