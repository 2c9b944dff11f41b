"""Whole saves and restores on S3 servers: one that guards its puts, one that ignores conditions."""

import secrets
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer, Destination
from ckpt.stores import open_store
from tests.ckpt.conftest import kill_daemon
from tests.stores.proxy import FaultProxy
from tests.stores.servers import BUCKET


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    path = tempfile.mkdtemp(prefix="ckpt-rt-", dir="/tmp")
    monkeypatch.setenv("CKPT_RUNTIME_DIR", path)
    yield
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
