"""What S3 stores do when the network or the server misbehaves. The server behind is real."""

import time
from dataclasses import replace

import pytest

from ckpt.stores import Limits, Outcome, open_store
from ckpt.stores.errors import StoreDenied, StoreFull, StoreTimeout, StoreUnavailable
from tests.stores.proxy import FaultProxy
from tests.stores.servers import S3Server

BIG = bytes(range(256)) * (3 << 16)  # 12 MiB: three parts of 5 MiB
LIMITS = Limits(
    stall_timeout_s=2,
    request_timeout_s=10,
    operation_timeout_s=30,
    part_bytes=4 << 20,
    single_put_bytes_max=4 << 20,
)
HASTY = replace(LIMITS, stall_timeout_s=0.5, request_timeout_s=1, operation_timeout_s=3)
HANG_S = 25.0  # far above every limit here: reached only by an operation that ignores them


@pytest.fixture
def proxy(moto_server):
    with FaultProxy(moto_server.port) as proxy:
        yield proxy


@pytest.fixture
def store(moto_server, proxy):
    with moto_server.through(proxy.port).store(limits=LIMITS) as store:
        yield store


def hasty(server, proxy, client="direct"):
    return server.through(proxy.port).store(client=client, limits=HASTY)


@pytest.mark.parametrize("client", ["direct", "s3fs"])
def test_a_silent_server_costs_no_more_than_the_deadline(moto_server, proxy, client):
    with hasty(moto_server, proxy, client) as store:
        proxy.faults.is_silent = True
        for call in (lambda: store.put("a", b"1"), lambda: store.get("a")):
            start = time.monotonic()
            with pytest.raises(StoreTimeout):
                call()
            assert time.monotonic() - start < HANG_S
        proxy.faults.is_silent = False


@pytest.mark.parametrize("client", ["direct", "s3fs"])
def test_a_store_works_again_after_a_silence(moto_server, proxy, client):
    with hasty(moto_server, proxy, client) as store:
        proxy.faults.is_silent = True
        with pytest.raises(StoreTimeout):
            store.put("a", b"1")
        proxy.faults.is_silent = False
        store.put("b", b"2")  # not "a": what was given up may still arrive
        assert store.get("b") == b"2"


def test_a_trickle_is_cut_off_by_the_deadline_of_the_request(moto_server, proxy):
    with hasty(moto_server, proxy) as store:
        store.put("big", BIG)
        proxy.faults.bytes_per_s = 200_000
        start = time.monotonic()
        with pytest.raises(StoreTimeout):
            store.get("big")
        assert time.monotonic() - start < HANG_S


def test_a_slow_connection_only_takes_longer(store, proxy):
    proxy.faults.latency_s, proxy.faults.bytes_per_s = 0.02, 30e6
    store.put("big", BIG)
    assert store.get("big") == BIG


@pytest.mark.parametrize("at", [0, 100, 100_000, 3 << 20])
def test_connections_reset_in_mid_upload_are_tried_again(store, proxy, at):
    proxy.faults.reset_after, proxy.faults.resets = at, 4
    store.put("big", BIG)
    assert proxy.faults.resets == 0
    assert store.get("big") == BIG


@pytest.mark.parametrize("at", [10, 100_000, 3 << 20])
def test_an_answer_cut_short_is_never_taken_for_whole(store, proxy, at):
    store.put("big", BIG)
    proxy.faults.half_close_after, proxy.faults.half_closes = at, 3
    assert store.get("big") == BIG
    assert proxy.faults.half_closes == 0


def test_a_throttling_server_is_waited_for(store, proxy):
    proxy.faults.refusals = 3
    store.put("big", BIG)
    proxy.faults.refusals = 3
    assert store.get("big") == BIG


def test_a_server_that_always_refuses_is_an_error_with_its_words(store, proxy):
    store.limits = replace(LIMITS, tries_max=2)
    proxy.faults.refusals = 1000
    with pytest.raises(StoreUnavailable, match=r"SlowDown.*after 2 tries") as failure:
        store.put("a", b"1")
    assert "ckpt bench" in failure.value.remedy


@pytest.mark.parametrize("status", [500, 502, 504])
def test_errors_of_the_server_are_tried_again(store, proxy, status):
    proxy.faults.refusal = b"HTTP/1.1 %d Oops\r\nContent-Length: 0\r\n\r\n" % status
    proxy.faults.refusals = 2
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_create_whose_answer_is_lost_finds_itself_and_says_created(store, proxy):
    store.probe()
    proxy.faults.lost_answers = 1
    assert store.put_if_absent("lock", b"mine") is Outcome.CREATED
    assert proxy.faults.lost_answers == 0


def test_an_upload_whose_last_answer_is_lost_is_there(store, proxy):
    with store.start_upload("big", len(BIG)) as upload:
        step = upload.part_bytes
        for index, start in enumerate(range(0, len(BIG), step)):
            upload.put_part(index, memoryview(BIG)[start : start + step])
        proxy.faults.lost_answers = 1
        upload.finish()
    assert store.get("big") == BIG


def test_an_upload_cut_off_for_good_leaves_parts_that_the_next_start_removes(store, proxy):
    with pytest.raises(StoreUnavailable), store.start_upload("big", len(BIG)) as upload:
        store.limits = replace(LIMITS, tries_max=1)
        proxy.faults.resets, proxy.faults.reset_after = 1000, 0
        upload.put_part(0, memoryview(BIG)[: upload.part_bytes])
    proxy.faults.resets = 0
    assert store.stat("big") is None
    assert list(store.abort_orphans(older_than_s=0)) == ["big"]
    assert list(store.abort_orphans(older_than_s=0)) == []


def expired(code=b"ExpiredToken"):
    body = b"<Error><Code>" + code + b"</Code><Message>The token has expired.</Message></Error>"
    head = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def test_credentials_that_expire_in_mid_upload_are_read_again(store, proxy, monkeypatch):
    proxy.faults.refusal = expired()
    with store.start_upload("big", len(BIG)) as upload:
        step = upload.part_bytes
        for index, start in enumerate(range(0, len(BIG), step)):
            proxy.faults.refusals = 1
            upload.put_part(index, memoryview(BIG)[start : start + step])
        upload.finish()
    assert store.get("big") == BIG


def test_new_credentials_from_the_environment_take_the_place_of_expired_ones(
    rclone_server, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the secret of yesterday")
    with FaultProxy(rclone_server.port) as proxy:
        server = rclone_server.through(proxy.port)
        with server.store(limits=LIMITS, key=None, secret=None) as store:
            with pytest.raises(StoreDenied, match="SignatureDoesNotMatch"):
                store.put("a", b"1")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.secret)
            proxy.faults.refusal, proxy.faults.refusals = expired(), 1
            store.put("a", b"1")
            assert store.get("a") == b"1"


def test_wrong_credentials_are_said_at_once_and_never_tried_again(rclone_server):
    with (
        FaultProxy(rclone_server.port) as proxy,
        rclone_server.through(proxy.port).store(secret="wrong", limits=LIMITS) as store,
    ):
        with pytest.raises(StoreDenied, match="SignatureDoesNotMatch"):
            store.put("a", b"1")
        assert len(proxy.requests) == 1


def test_a_full_store_is_said_to_be_full(store, proxy):
    body = b"<Error><Code>QuotaExceeded</Code></Error>"
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body)
    proxy.faults.refusal, proxy.faults.refusals = head + body, 1
    with pytest.raises(StoreFull, match="QuotaExceeded"):
        store.put("a", b"1")


def test_a_missing_bucket_is_named(moto_server):
    with (
        open_store("s3://no-such-bucket/x", limits=LIMITS, **moto_server.options()) as store,
        pytest.raises(StoreDenied, match="NoSuchBucket") as failure,
    ):
        store.put("a", b"1")
    assert "bucket" in failure.value.remedy


def test_a_dead_server_is_an_error_within_the_deadline():
    with (
        S3Server("gone", "http://127.0.0.1:9").store(limits=HASTY) as store,
        pytest.raises(StoreUnavailable, match="refused"),
    ):
        store.put("a", b"1")
