import asyncio
import ssl
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import grpc
import pytest
from aiohttp import web

from lighthouse.front import Front, FrontLimits, raise_open_files_limit
from lighthouse.security import tls_context
from tests.lighthouse.certificates import Authority


class Echo(grpc.GenericRpcHandler):
    """`/t/echo` answers once; `/t/stream` answers each message; `/t/flood` never stops."""

    def service(self, details):
        return {
            "/t/echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "/t/stream": grpc.stream_stream_rpc_method_handler(self.stream),
            "/t/flood": grpc.unary_stream_rpc_method_handler(self.flood),
        }.get(details.method)

    async def echo(self, request, context):
        return request

    async def stream(self, requests, context):
        async for request in requests:
            yield request

    async def flood(self, request, context):
        while True:
            yield bytes(100_000)


async def page(request):
    return web.Response(text="the page")


@asynccontextmanager
async def world(tmp_path, *, limits=None, tls=None):
    """A front with an echoing gRPC server and a page behind it. Yields the front and the port."""
    async with AsyncExitStack() as stack:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Echo(),))
        server.add_insecure_port(f"unix:{tmp_path}/grpc.sock")
        await server.start()
        stack.push_async_callback(server.stop, grace=None)
        app = web.Application()
        app.router.add_get("/", page)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        front = Front(grpc_socket=f"{tmp_path}/grpc.sock", http=runner.server, limits=limits)
        yield front, await stack.enter_async_context(front.listening("127.0.0.1", 0, tls))


def story(tell):
    async def main():
        async with asyncio.timeout(60):
            await tell()

    asyncio.run(main())


async def get(port, scheme="http", **more):
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{scheme}://localhost:{port}/", **more) as answer,
    ):
        return await answer.text()


async def echo(channel, message=b"hello"):
    return await channel.unary_unary("/t/echo")(message, timeout=30)


def test_one_port_speaks_grpc_and_http(tmp_path):
    async def tell():
        async with world(tmp_path) as (_, port):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                assert await echo(channel, bytes(3_000_000)) == bytes(3_000_000)
            assert await get(port) == "the page"

    story(tell)


def test_a_preface_that_arrives_byte_by_byte_is_understood(tmp_path):
    async def tell():
        async with world(tmp_path) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4\0" + bytes(4):
                writer.write(bytes([byte]))
                await writer.drain()
            header = await reader.readexactly(9)
            assert header[3] == 4  # the gRPC server's SETTINGS frame
            writer.close()

    story(tell)


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def test_with_tls_a_browser_gets_the_page_and_grpc_gets_grpc(tmp_path, authority):
    cert, key = authority.issue("server")

    async def tell():
        async with world(tmp_path, tls=tls_context(cert=cert, key=key)) as (_, port):
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
                assert await echo(channel) == b"hello"
            browser = ssl.create_default_context(cafile=authority.ca)
            browser.set_alpn_protocols(["h2", "http/1.1"])  # the order of a browser
            assert await get(port, "https", ssl=browser) == "the page"

    story(tell)


def test_with_mutual_tls_nobody_gets_in_without_a_certificate(tmp_path, authority):
    cert, key = authority.issue("server")
    client_cert, client_key = authority.issue("client")
    tls = tls_context(cert=cert, key=key, client_ca=authority.ca)

    async def tell():
        async with world(tmp_path, tls=tls) as (_, port):
            stranger = ssl.create_default_context(cafile=authority.ca)
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await get(port, "https", ssl=stranger)
            known = grpc.ssl_channel_credentials(
                authority.ca.read_bytes(), client_key.read_bytes(), client_cert.read_bytes()
            )
            async with grpc.aio.secure_channel(f"localhost:{port}", known) as channel:
                assert await echo(channel) == b"hello"

    story(tell)


@pytest.mark.parametrize(
    "noise",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/9.9\r\n\r\n", bytes(200_000), b"\r\n" * 99],
)
def test_noise_is_answered_or_closed_and_harms_nobody(tmp_path, noise):
    async def tell():
        limits = FrontLimits(first_bytes_timeout_s=0.2)
        async with world(tmp_path, limits=limits) as (front, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(noise)
            writer.write_eof()
            try:
                await reader.read()
            except ConnectionError:
                pass
            writer.close()
            assert await get(port) == "the page"
            while front.doors:
                await asyncio.sleep(0.01)

    story(tell)


def test_who_says_nothing_is_closed(tmp_path):
    async def tell():
        limits = FrontLimits(first_bytes_timeout_s=0.1)
        async with world(tmp_path, limits=limits) as (front, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises((ConnectionError, EOFError)):
                await reader.readexactly(1)
            assert not front.doors
            writer.close()

    story(tell)


def test_connections_beyond_the_limit_are_refused_and_the_others_stay(tmp_path):
    async def tell():
        async with world(tmp_path, limits=FrontLimits(connections_max=3)) as (front, port):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            assert await echo(channel) == b"hello"
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            while front.refused < 3:
                await asyncio.sleep(0.01)
            assert await echo(channel) == b"hello"
            for _, writer in idle:
                writer.close()
            await channel.close()

    story(tell)


def test_a_reader_that_stops_reading_holds_its_sender_back_and_is_cut_off(tmp_path):
    async def tell():
        limits = FrontLimits(buffer_bytes=10_000, stall_timeout_s=0.3)
        async with world(tmp_path, limits=limits) as (front, port):
            # A client that opens all its windows wide and then reads nothing.
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            window = b"\0\0\6\4\0\0\0\0\0" + b"\0\4\x7f\xff\xff\xff"
            headers = bytes.fromhex("83 86 44 08") + b"/t/flood"
            headers += b"\x41\x01h" + b"\x5f\x10application/grpc" + b"\x40\2te\x08trailers"
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + window)
            writer.write(b"\0\0\4\x08\0\0\0\0\0\x7f\xf0\0\0")
            writer.write(len(headers).to_bytes(3, "big") + b"\1\4\0\0\0\1" + headers)
            writer.write(b"\0\0\5\0\1\0\0\0\1" + bytes(5))
            while not front.cut_off:
                await asyncio.sleep(0.02)
            assert await get(port) == "the page"
            writer.close()

    story(tell)


IDLE = """
import resource, socket, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(10_000)]
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(raise_open_files_limit() < 10_500, reason="the system gives too few open files")
def test_ten_thousand_idle_connections_leave_room_for_work(tmp_path):
    async def tell():
        async with world(tmp_path, limits=FrontLimits(first_bytes_timeout_s=60)) as (front, port):
            crowd = await asyncio.create_subprocess_exec(
                sys.executable, "-c", IDLE, str(port), stdin=-1, stdout=-1
            )
            assert await crowd.stdout.readline() == b"open\n"
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                assert await echo(channel) == b"hello"
            assert await get(port) == "the page"
            assert len(front.doors) >= 10_000 and front.refused == 0
            crowd.kill()
            await crowd.wait()

    story(tell)
