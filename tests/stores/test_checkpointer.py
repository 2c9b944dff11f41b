"""Whole saves and restores on S3 servers: one that guards its puts, one that ignores conditions."""

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer, Destination
from ckpt.stores import open_store
from ckpt.tools import verify
from ftcore.base.errors import FtError
from tests.ckpt.conftest import ROOT, kill_daemon
from tests.stores.proxy import FaultProxy
from tests.stores.servers import BUCKET
from tests.stores.test_faults import expired


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    path = tempfile.mkdtemp(prefix="ckpt-rt-", dir="/tmp")
    monkeypatch.setenv("CKPT_RUNTIME_DIR", path)
    yield Path(path)
    kill_daemon(Path(path))
    shutil.rmtree(path, ignore_errors=True)


def state(seed):
    torch.manual_seed(seed)
    return {"model": {"w": torch.randn(300, 4000), "b": torch.randn(5)}, "extra": {"seed": seed}}


def same(a, b):
    tensors = all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"])
    return tensors and a["extra"] == b["extra"]


@pytest.mark.parametrize("client", ["direct", "s3fs"])
@pytest.mark.parametrize("kind", ["moto", "rclone", "own"])
def test_a_step_goes_to_s3_and_comes_back(request, kind, client):
    server = request.getfixturevalue(f"{kind}_server")
    url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
    where = Destination(url=url, options=server.options(client))
    saved, other = state(1), state(2)
    with Checkpointer(where, keep_last=1, inline=True) as checkpoints:
        checkpoints.save(state(0), step=6).wait_durable()
        checkpoints.save(saved, step=7).wait_durable()
    with Checkpointer(where, inline=True) as checkpoints:
        assert checkpoints.restore(other) == 7
    assert same(saved, other)
    with open_store(url, **server.options()) as store:
        assert not [i.key for i in store.list("step-0000000006/")]


def test_a_save_goes_on_through_resets_and_throttling(moto_server):
    with FaultProxy(moto_server.port) as proxy:
        url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
        bad = Destination(url=url, options=moto_server.through(proxy.port).options())
        saved, other = state(1), state(2)
        with Checkpointer(bad, inline=True) as checkpoints:
            proxy.faults.refusals, proxy.faults.resets, proxy.faults.reset_after = 2, 3, 100_000
            checkpoints.save(saved, step=7).wait_durable()
        with Checkpointer(bad, inline=True) as checkpoints:
            proxy.faults.half_closes, proxy.faults.half_close_after = 2, 3_000
            assert checkpoints.restore(other) == 7
        assert same(saved, other)


@pytest.fixture
def bad_line(rclone_server):
    """A proxy before a real server, and the destination that it leads to."""
    with FaultProxy(rclone_server.port) as proxy:
        url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
        yield proxy, Destination(url=url, options=rclone_server.through(proxy.port).options())


def saved_through(where, faults, **changes):
    """Save step 7 while these faults last, and read it back without them."""
    with Checkpointer(where, inline=True) as checkpoints:
        for name, value in changes.items():
            setattr(faults, name, value)
        checkpoints.save(state(1), step=7).wait_durable(120)
        for name, value in changes.items():
            setattr(faults, name, type(value)())
    found = state(2)
    with Checkpointer(where, inline=True) as checkpoints:
        checkpoints._memory = lambda: None
        assert checkpoints.restore(found) == 7
    return same(found, state(1))


def test_credentials_that_expire_in_mid_upload_cost_the_save_nothing(bad_line):
    proxy, where = bad_line
    assert saved_through(where, proxy.faults, refusal=expired(), refusals=3)


def test_a_slow_connection_only_makes_a_save_slow(bad_line):
    proxy, where = bad_line
    assert saved_through(where, proxy.faults, latency_s=0.02, bytes_per_s=3e6)


def test_half_closed_connections_and_lost_answers_cost_a_save_nothing(bad_line):
    proxy, where = bad_line
    faults = {"half_closes": 2, "half_close_after": 100, "lost_answers": 2}
    assert saved_through(where, proxy.faults, **faults)


DENIED = (
    b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 61\r\n\r\n"
    b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
)


def test_a_store_that_refuses_is_told_with_its_words_and_the_next_save_succeeds(bad_line):
    proxy, where = bad_line
    with Checkpointer(where, inline=True) as checkpoints:
        checkpoints.save(state(0), step=1).wait_durable(60)
        proxy.faults.refusal, proxy.faults.refusals = DENIED, 10_000
        with pytest.raises(FtError, match="AccessDenied") as failure:
            checkpoints.save(state(1), step=2).wait_durable(120)
        assert failure.value.remedy
        proxy.faults.refusals = 0
        checkpoints.save(state(1), step=3).wait_durable(60)
        found = state(2)
        checkpoints._memory = lambda: None
        assert checkpoints.restore(found) == 3
    assert same(found, state(1))


def test_a_bit_that_flips_on_the_server_is_found_and_the_step_before_it_loads(moto_server):
    url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
    where = Destination(url=url, options=moto_server.options())
    with Checkpointer(where, inline=True) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state(step), step=step).wait_durable(60)
    with open_store(url, **moto_server.options()) as store:
        key = next(i.key for i in store.list("step-0000000002/") if i.key.endswith("safetensors"))
        data = bytearray(store.get(key))
        data[-5000] ^= 4
        store.put(key, bytes(data))
        assert not verify(store, 2, deep=True).is_good
    found = state(9)
    with Checkpointer(where, inline=True) as checkpoints:
        assert checkpoints.restore(found) == 1
    assert same(found, state(1))


UPLOADS = """
import json, sys, torch
from ckpt import Checkpointer, Destination
where = Destination(url=sys.argv[1], options=json.loads(sys.argv[2]), bytes_per_s=2e7)
checkpoints = Checkpointer(where)
checkpoints.save({"w": torch.zeros(24 << 20)}, step=1).wait_durable(600)
"""


def test_parts_of_an_upload_that_died_are_removed_at_the_next_start(moto_server, runtime):
    """Trainer and daemon are killed while parts of a file are at the server."""
    prefix = secrets.token_hex(4)
    url, options = f"s3://{BUCKET}/{prefix}", moto_server.options()
    command = [sys.executable, "-c", UPLOADS, url, json.dumps(options)]
    with subprocess.Popen(command, cwd=ROOT) as trainer:
        while not unfinished(moto_server, prefix):
            assert trainer.poll() is None
            time.sleep(0.05)
        trainer.kill()
    kill_daemon(runtime)
    assert unfinished(moto_server, prefix)
    with Checkpointer(Destination(url=url, options=options), inline=True) as checkpoints:
        checkpoints.save(state(1), step=2).wait_durable(60)
    assert not unfinished(moto_server, prefix)


def unfinished(server, prefix):
    answer = server.client().list_multipart_uploads(Bucket=BUCKET)
    return [u["Key"] for u in answer.get("Uploads", ()) if u["Key"].startswith(prefix)]
