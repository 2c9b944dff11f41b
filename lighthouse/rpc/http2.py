"""One HTTP/2 connection as seen by a server, without I/O: bytes in, events and bytes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import hpack

from lighthouse.rpc import frames as h2
from lighthouse.rpc.frames import Http2Error

STREAMS_MAX = 1000
STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 8 << 20
HEADER_BYTES_MAX = 16_384
CONTROL_FRAMES_PER_S_MAX = 2_000  # pings, resets and empty frames that a peer may cost us
UPDATES_PER_FRAME = 2  # a reader answers our data with WINDOW_UPDATE: those are not counted

Headers = Sequence[tuple[bytes, bytes]]


class Stream:
    """One request and its reply. `waiting` is what the peer's windows do not let out yet."""

    __slots__ = ("call", "id", "may_take", "owed", "peer_ended", "trailer", "waiting", "window")

    def __init__(self, stream_id: int, window: int) -> None:
        self.id = stream_id
        self.window = window  # what we may send
        self.may_take = STREAM_WINDOW  # what the peer may send
        self.owed = 0  # taken, and not given back to the peer yet
        self.waiting: deque[bytes] = deque()
        self.trailer: bytes | None = None  # ends the reply once all else is out
        self.peer_ended = False
        self.call: object = None


class Events(Protocol):
    """Who is told what the peer did."""

    def requested(self, stream: Stream, headers: Headers) -> None: ...
    def received(self, stream: Stream, data: bytes) -> None: ...
    def peer_ended(self, stream: Stream) -> None: ...
    def was_reset(self, stream: Stream) -> None: ...
    def drained(self, stream: Stream) -> None: ...


class Http2:
    """Feed `receive`, then send what `take` returns. Raises Http2Error when the peer must go."""

    def __init__(self, events: Events, clock: Callable[[], float]) -> None:
        self.streams: dict[int, Stream] = {}
        self.blocked: dict[int, Stream] = {}  # streams with something waiting
        self.last_stream = 0
        self._events, self._clock = events, clock
        self._decoder = hpack.Decoder(max_header_list_size=HEADER_BYTES_MAX)
        self._in = bytearray()
        self._is_greeted = False
        self._block: tuple[int, int, bytes] | None = None  # headers that go on in CONTINUATION
        self._window, self._stream_window = h2.WINDOW_FIRST, h2.WINDOW_FIRST
        self._may_take, self._owed = CONNECTION_WINDOW, 0
        self._control, self._control_until = 0, 0.0
        self._out = [
            h2.settings(
                {
                    h2.MAX_STREAMS: STREAMS_MAX,
                    h2.INITIAL_WINDOW: STREAM_WINDOW,
                    h2.HEADER_LIST_MAX: HEADER_BYTES_MAX,
                }
            ),
            h2.window_update(0, CONNECTION_WINDOW - h2.WINDOW_FIRST),
        ]

    # What comes in

    def receive(self, data: bytes) -> None:
        buffer, at = self._in, 0
        buffer += data
        if not self._is_greeted:
            if len(buffer) < len(h2.PREFACE):
                return
            if not buffer.startswith(h2.PREFACE):
                raise Http2Error(h2.PROTOCOL_ERROR, "this is not the HTTP/2 preface")
            self._is_greeted, at = True, len(h2.PREFACE)
        while len(buffer) >= at + 9:
            size = buffer[at] << 16 | buffer[at + 1] << 8 | buffer[at + 2]
            if size > h2.FRAME_MAX:
                raise Http2Error(h2.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            end = at + 9 + size
            if len(buffer) < end:
                break
            stream_id = int.from_bytes(buffer[at + 5 : at + 9], "big") & h2.WINDOW_MAX
            self._frame(buffer[at + 3], buffer[at + 4], stream_id, bytes(buffer[at + 9 : end]))
            at = end
        del buffer[:at]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != h2.CONTINUATION or stream_id != self._block[0]):
            raise Http2Error(h2.PROTOCOL_ERROR, "a header block was interrupted")
        if kind != h2.HEADERS and not (kind == h2.DATA and payload):
            self._count_control_frame()
        handler = HANDLERS.get(kind)
        if handler is not None:  # kinds that we do not know are to be ignored
            handler(self, flags, stream_id, payload)

    def _count_control_frame(self) -> None:
        now = self._clock()
        if now >= self._control_until:
            self._control, self._control_until = 0, now + 1.0
        self._control += 1
        if self._control > CONTROL_FRAMES_PER_S_MAX:
            raise Http2Error(h2.ENHANCE_YOUR_CALM, "a flood of control frames")

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._may_take -= size
        if self._may_take < 0:
            raise Http2Error(h2.FLOW_CONTROL_ERROR, "more data than the connection's window")
        stream = self.streams.get(stream_id)
        if stream is None or stream.peer_ended:
            self._require_seen(stream_id)
            self._give_back(size)
            return
        stream.may_take -= size
        if stream.may_take < 0:
            raise Http2Error(h2.FLOW_CONTROL_ERROR, "more data than the stream's window")
        data = h2.unpadded(flags & ~h2.HAS_PRIORITY, payload)
        if len(data) < size:
            self.used(stream, size - len(data))
        if data:
            self._events.received(stream, data)
        if flags & h2.END_STREAM:
            self._end_by_peer(stream)

    def _require_seen(self, stream_id: int) -> None:
        if stream_id == 0 or stream_id > self.last_stream or stream_id % 2 == 0:
            raise Http2Error(h2.PROTOCOL_ERROR, f"stream {stream_id} was never opened")

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._block = (stream_id, flags, h2.unpadded(flags, payload))
        self._continue(flags)

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(h2.PROTOCOL_ERROR, "CONTINUATION of nothing")
        number, first, block = self._block
        self._block = (number, first, block + payload)
        self._continue(flags)

    def _continue(self, flags: int) -> None:
        assert self._block is not None
        stream_id, first, block = self._block
        if len(block) > HEADER_BYTES_MAX:
            raise Http2Error(h2.ENHANCE_YOUR_CALM, "a header block without end")
        if not flags & h2.END_HEADERS:
            return
        self._block = None
        try:
            headers = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise Http2Error(h2.COMPRESSION_ERROR, f"headers: {error}") from error
        self._open(stream_id, headers, is_last=bool(first & h2.END_STREAM))

    def _open(self, stream_id: int, headers: Headers, *, is_last: bool) -> None:
        if stream_id <= self.last_stream:  # trailers of the client
            self._require_seen(stream_id)
            stream = self.streams.get(stream_id)
            if stream is not None and is_last:
                self._end_by_peer(stream)
            return
        if stream_id % 2 == 0:
            raise Http2Error(h2.PROTOCOL_ERROR, f"a client opened stream {stream_id}")
        self.last_stream = stream_id
        if len(self.streams) >= STREAMS_MAX:
            self._reset_frame(stream_id, h2.REFUSED_STREAM)
            return
        stream = self.streams[stream_id] = Stream(stream_id, self._stream_window)
        self._events.requested(stream, headers)
        if is_last:
            self._end_by_peer(stream)

    def _end_by_peer(self, stream: Stream) -> None:
        if not stream.peer_ended:
            stream.peer_ended = True
            self._events.peer_ended(stream)

    def _rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._require_seen(stream_id)
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            self._events.was_reset(stream)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & h2.ACK:
            return
        for name, value in h2.parse_settings(payload):
            if name == h2.INITIAL_WINDOW:
                if value > h2.WINDOW_MAX:
                    raise Http2Error(h2.FLOW_CONTROL_ERROR, f"a first window of {value}")
                for stream in self.streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
        self._out.append(h2.frame(h2.SETTINGS, h2.ACK, 0))
        self._flush_blocked()

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise Http2Error(h2.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if not flags & h2.ACK:
            self._out.append(h2.frame(h2.PING, h2.ACK, 0, payload))

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        increment = int.from_bytes(payload, "big") & h2.WINDOW_MAX
        if len(payload) != 4 or not increment:
            raise Http2Error(h2.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
        if stream_id == 0:
            self._window += increment
            if self._window > h2.WINDOW_MAX:
                raise Http2Error(h2.FLOW_CONTROL_ERROR, "the connection's window overflows")
            self._flush_blocked()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._require_seen(stream_id)
            return
        stream.window += increment
        if stream.window > h2.WINDOW_MAX:
            raise Http2Error(h2.FLOW_CONTROL_ERROR, "a stream's window overflows")
        self._flush(stream)

    def _push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise Http2Error(h2.PROTOCOL_ERROR, "a client pushed")

    # What goes out

    def take(self) -> bytes:
        """All that is to be sent now."""
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out = []
        return data

    def has_output(self) -> bool:
        return bool(self._out)

    def send_headers(self, stream: Stream, block: bytes) -> None:
        self._out.append(h2.frame(h2.HEADERS, h2.END_HEADERS, stream.id, block))

    def send(self, stream: Stream, data: bytes) -> None:
        """Send `data`, or as much as the peer's windows allow and the rest later."""
        stream.waiting.append(data)
        self._flush(stream)

    def end(self, stream: Stream, trailer: bytes) -> None:
        """Close the reply, after all that waits, with a header block."""
        stream.trailer = trailer
        self._flush(stream)

    def used(self, stream: Stream, size: int) -> None:
        """`size` bytes of the request have left the buffers: the peer may send as many again."""
        self._give_back(size)
        stream.owed += size
        if stream.owed >= STREAM_WINDOW // 2 and not stream.peer_ended:
            self._out.append(h2.window_update(stream.id, stream.owed))
            stream.may_take += stream.owed
            stream.owed = 0

    def ping(self) -> None:
        self._out.append(h2.frame(h2.PING, 0, 0, bytes(8)))

    def go_away(self, code: int, why: str) -> None:
        self._out.append(h2.goaway(self.last_stream, code, why))

    def _give_back(self, size: int) -> None:
        self._owed += size
        if self._owed >= CONNECTION_WINDOW // 2:
            self._out.append(h2.window_update(0, self._owed))
            self._may_take += self._owed
            self._owed = 0

    def _flush_blocked(self) -> None:
        for stream in list(self.blocked.values()):
            self._flush(stream)

    def _flush(self, stream: Stream) -> None:
        waiting = stream.waiting
        while waiting:
            room = min(stream.window, self._window)
            if room <= 0:
                self.blocked[stream.id] = stream
                return
            data = waiting.popleft()
            if len(data) > room:
                waiting.appendleft(data[room:])
                data = data[:room]
            stream.window -= len(data)
            self._window -= len(data)
            for at in range(0, len(data), h2.FRAME_MAX):
                piece = data[at : at + h2.FRAME_MAX]
                self._out.append(h2.frame(h2.DATA, 0, stream.id, piece))
                self._control -= UPDATES_PER_FRAME
        if self.blocked.pop(stream.id, None) is not None:
            self._events.drained(stream)
        if stream.trailer is not None:
            flags = h2.END_HEADERS | h2.END_STREAM
            self._out.append(h2.frame(h2.HEADERS, flags, stream.id, stream.trailer))
            if not stream.peer_ended:
                self._reset_frame(stream.id, h2.NO_ERROR)
            self._forget(stream)

    def _reset_frame(self, stream_id: int, code: int) -> None:
        self._out.append(h2.frame(h2.RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))

    def _forget(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        self.blocked.pop(stream.id, None)
        stream.waiting.clear()
        stream.peer_ended = True


HANDLERS: dict[int, Callable[[Http2, int, int, bytes], None]] = {
    h2.DATA: Http2._data,
    h2.HEADERS: Http2._headers,
    h2.RST_STREAM: Http2._rst_stream,
    h2.SETTINGS: Http2._settings,
    h2.PUSH_PROMISE: Http2._push_promise,
    h2.PING: Http2._ping,
    h2.WINDOW_UPDATE: Http2._window_update,
    h2.CONTINUATION: Http2._continuation,
}
