"""What a rank tells of itself to managers that find a step too long."""

import socket

import pytest
import torch
import torch.distributed as dist

from flightrec.dump import read_dump
from flightrec.errors import BadDump
from ftcore.flight import WANT, FlightRecord, fetch_record
from ftcore.heal import HealServer, OfferRefused, SourceLost, wire
from ftcore.process_group.gloo import GlooGroup
from ftcore.process_group.store import host_store


@pytest.fixture
def server():
    with HealServer() as server:
        server.record = FlightRecord()
        yield server


def test_a_rank_tells_its_calls_by_the_name_of_their_group_and_its_stacks(server):
    store = host_store("127.0.0.1")
    with GlooGroup() as group, GlooGroup() as peer:
        in_pairs(store, group, peer)
        dump, stacks = fetch_record(server.address, timeout_s=10)
    names = {(found.name, found.desc) for found in read_dump(dump).groups}
    assert ("job/1.1/0", "ftcore") in names
    assert b"fetch_record" in stacks and b"MainThread" in stacks


def in_pairs(store, *groups):
    """One all-reduce of two groups that are two ranks of one process."""
    from concurrent.futures import ThreadPoolExecutor

    def run(rank):
        options = {"prefix": "job/1.1/0", "rank": rank, "world_size": 2, "timeout_s": 20}
        groups[rank].configure(store_address=store.address, **options)
        dist.all_reduce(torch.ones(1), group=groups[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def test_those_who_ask_together_get_one_record(server):
    first, second = (fetch_record(server.address, timeout_s=10) for _ in range(2))
    assert first == second


def test_a_server_without_a_record_answers_with_nothing():
    with HealServer() as server:
        assert fetch_record(server.address, timeout_s=10) == (b"", b"")


def test_a_stranger_to_the_job_is_told_nothing(server, monkeypatch):
    monkeypatch.setenv("FTCORE_TOKEN", "secret")
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        wire.send_frame(connection, {"ftheal": 1, "want": WANT, "token": "guess"})
        assert "token" in wire.receive_frame(connection)["refused"]
    fetch_record(server.address, timeout_s=10)  # those who know it are


def test_a_refusal_is_an_error_with_a_remedy(server, monkeypatch):
    import ftcore.flight as flight

    tokens = iter(["mine", "that of another job"])  # the reader's, then the server's
    monkeypatch.setattr(flight, "_token", lambda: next(tokens))
    with pytest.raises(OfferRefused, match="not that of this job"):
        fetch_record(server.address, timeout_s=10)


def test_nobody_there_is_an_error_and_no_wait():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises((OSError, SourceLost)):
        fetch_record(address, timeout_s=10)


def test_an_empty_record_is_no_dump():
    with pytest.raises(BadDump):
        read_dump(b"")
