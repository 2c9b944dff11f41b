"""Our gRPC server against grpcio's own client, against rude clients, and against noise."""

import asyncio

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lighthouse.rpc import frames as h2
from lighthouse.rpc.call import CallFailed, parse_timeout_s
from lighthouse.rpc.frames import Http2Error
from lighthouse.rpc.http2 import CONTROL_FRAMES_PER_S_MAX, STREAMS_MAX, Http2
from tests.lighthouse.test_front import echo, story, world


def with_channel(tell, *options):
    async def main():
        async with world() as (front, port):
            address = f"127.0.0.1:{port}"
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                await tell(front, channel)

    story(main)


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_384, 65_536, 4_000_000])
def test_messages_of_every_size_come_back_whole(size):
    async def tell(front, channel):
        assert await echo(channel, bytes(size)) == bytes(size)

    with_channel(tell, ("grpc.max_receive_message_length", 5 << 20))


def test_many_calls_share_one_connection():
    async def tell(front, channel):
        messages = [bytes([n % 256]) * 5_000 for n in range(300)]
        assert await asyncio.gather(*(echo(channel, m) for m in messages)) == messages

    with_channel(tell)


def test_a_stream_goes_both_ways_for_as_long_as_the_client_likes():
    async def tell(front, channel):
        call = channel.stream_stream("/t/stream")()
        for number in range(3_000):
            await call.write(number.to_bytes(4, "big"))
            assert await call.read() == number.to_bytes(4, "big")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK

    with_channel(tell)


def test_a_cancelled_call_ends_its_handler():
    async def tell(front, channel):
        call = channel.stream_stream("/t/stream")()
        await call.write(b"x")
        assert await call.read() == b"x" and front.rpc.tasks
        call.cancel()
        while front.rpc.tasks:
            await asyncio.sleep(0.001)

    with_channel(tell)


def test_what_a_client_gets_wrong_has_its_status():
    async def tell(front, channel):
        for path, message, code in (
            ("/t/nothing", b"", grpc.StatusCode.UNIMPLEMENTED),
            ("/t/echo", bytes(5 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(path)(message, timeout=10)
            assert refused.value.code() is code
        assert await echo(channel) == b"hello"

    with_channel(tell)


def test_a_handler_may_end_a_call_with_a_status_words_and_a_trailer():
    async def refuse(call):
        words = "the leader is ü: 50 %"
        raise CallFailed(grpc.StatusCode.UNAVAILABLE, words, {"ftcore-leader": "h:1"})

    async def tell(front, channel):
        front.rpc.handlers = {"/t/refuse": refuse}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/t/refuse")(b"", timeout=10)
        assert refused.value.details() == "the leader is ü: 50 %"
        assert dict(refused.value.trailing_metadata())["ftcore-leader"] == "h:1"

    with_channel(tell)


def test_a_handler_that_crashes_costs_one_call_and_no_connection():
    async def crash(call):
        raise ValueError("a bug")

    async def tell(front, channel):
        front.rpc.handlers = {**front.rpc.handlers, "/t/crash": crash}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/t/crash")(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert await echo(channel) == b"hello"

    with_channel(tell)


def test_a_handler_that_reads_slowly_holds_its_own_client_back():
    release = asyncio.Event()

    async def slow(call):
        await release.wait()
        count = 0
        while await call.read() is not None:
            count += 1
        await call.write(str(count).encode())

    async def tell(front, channel):
        front.rpc.handlers = {**front.rpc.handlers, "/t/slow": slow}
        call = channel.stream_stream("/t/slow")()
        writes = [asyncio.create_task(call.write(bytes(100_000))) for _ in range(1)]
        sent = 0
        while True:  # until the windows are full
            try:
                await asyncio.wait_for(call.write(bytes(100_000)), 0.3)
                sent += 1
            except TimeoutError:
                break
        assert sent < 100 and await echo(channel) == b"hello"
        await asyncio.gather(*writes)
        call.cancel()

    with_channel(tell)


# The state machine alone


class Ignore:
    """An upper layer that answers nothing."""

    def __init__(self):
        self.resets, self.opened = 0, 0

    def requested(self, stream, headers):
        self.opened += 1

    def received(self, stream, data): ...
    def peer_ended(self, stream): ...
    def drained(self, stream): ...
    def was_reset(self, stream):
        self.resets += 1


def http2():
    machine = Http2(Ignore(), clock=lambda: 0.0)
    machine.receive(h2.PREFACE + h2.settings({}))
    return machine


REQUEST = bytes.fromhex("83 86 44 08") + b"/t/flood"
OPEN = h2.END_HEADERS
kinds, flags = st.integers(0, 11), st.integers(0, 255)
stream_ids = st.one_of(st.integers(0, 9), st.integers(0, 2**31 - 1))
random_frames = st.builds(h2.frame, kinds, flags, stream_ids, st.binary(max_size=40))
requests = st.builds(
    lambda n, f: h2.frame(h2.HEADERS, f | OPEN, 2 * n + 1, REQUEST), st.integers(0, 5), flags
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(random_frames, requests), max_size=30), st.integers(1, 50))
def test_any_frames_are_taken_or_refused_and_nothing_else(frames, cut):
    machine, data = http2(), b"".join(frames)
    try:
        for at in range(0, len(data), cut):
            machine.receive(data[at : at + cut])
    except Http2Error as error:
        assert str(error)
    assert len(machine.streams) <= STREAMS_MAX and set(machine.blocked) <= set(machine.streams)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused_and_nothing_else(data):
    try:
        http2().receive(data)
    except Http2Error as error:
        assert str(error)


@pytest.mark.parametrize(
    "frame",
    [
        h2.frame(h2.PING, 0, 0, bytes(8)),
        h2.frame(h2.SETTINGS, 0, 0),
        h2.frame(h2.DATA, 0, 1),
        h2.frame(h2.RST_STREAM, 0, 1, bytes(4)),
    ],
)
def test_a_flood_of_control_frames_ends_the_connection(frame):
    machine = http2()
    machine.receive(h2.frame(h2.HEADERS, OPEN, 1, REQUEST))
    with pytest.raises(Http2Error, match="flood"):
        machine.receive(frame * (CONTROL_FRAMES_PER_S_MAX + 1))


def test_a_header_block_without_end_ends_the_connection():
    machine = http2()
    machine.receive(h2.frame(h2.HEADERS, 0, 1, REQUEST))
    with pytest.raises(Http2Error, match="without end"):
        for _ in range(3):
            machine.receive(h2.frame(h2.CONTINUATION, 0, 1, bytes(10_000)))


def test_requests_that_are_reset_at_once_leave_nothing_and_are_bounded():
    machine = http2()
    for number in range(CONTROL_FRAMES_PER_S_MAX - 10):
        stream_id = 2 * number + 1
        machine.receive(h2.frame(h2.HEADERS, OPEN, stream_id, REQUEST))
        machine.receive(h2.frame(h2.RST_STREAM, 0, stream_id, bytes(4)))
    assert not machine.streams
    with pytest.raises(Http2Error, match="flood"):
        machine.receive(h2.frame(h2.RST_STREAM, 0, 1, bytes(4)) * 20)


def test_more_streams_than_we_said_are_refused_and_the_others_live():
    machine = http2()
    for number in range(STREAMS_MAX + 5):
        machine.receive(h2.frame(h2.HEADERS, OPEN, 2 * number + 1, REQUEST))
    assert len(machine.streams) == STREAMS_MAX


def test_data_waits_for_the_peers_windows_and_then_goes_out_in_order():
    machine = http2()
    machine.receive(h2.settings({h2.INITIAL_WINDOW: 10}))
    machine.receive(h2.frame(h2.HEADERS, OPEN, 1, REQUEST))
    stream, text = machine.streams[1], bytes(range(25))
    machine.take()
    machine.send(stream, text)
    machine.end(stream, b"")
    sent = machine.take()[9:]
    while machine.blocked:
        machine.receive(h2.window_update(1, 7))
        sent += machine.take()[9 : 9 + 7]
    assert sent[:25] == text and not machine.streams


def test_more_data_than_our_window_ends_the_connection():
    machine = http2()
    machine.receive(h2.frame(h2.HEADERS, OPEN, 1, REQUEST))
    with pytest.raises(Http2Error, match="window"):
        for _ in range(100):
            machine.receive(h2.frame(h2.DATA, 0, 1, bytes(h2.FRAME_MAX)))


@pytest.mark.parametrize(
    ("text", "seconds"), [("10S", 10), ("250m", 0.25), ("2H", 7200), ("", None), ("1e3S", None)]
)
def test_timeouts_are_read_as_grpc_writes_them(text, seconds):
    assert parse_timeout_s(text) == seconds
