import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from tests.ckpt.conftest import kill_daemon


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    path = tempfile.mkdtemp(prefix="ckpt-rt-", dir="/tmp")
    monkeypatch.setenv("CKPT_RUNTIME_DIR", path)
    yield Path(path)
    kill_daemon(Path(path))
    shutil.rmtree(path, ignore_errors=True)


def trained(seed=0, steps=2):
    """A model and an optimizer that have been used, and plain values beside them."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 7, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    extra = {"epoch": 3, "names": ["a", "b"], "half": torch.arange(6).to(torch.bfloat16)}
    return {"model": model, "optimizer": optimizer, "extra": extra}


def save(state, directory, *, step):
    with Checkpointer(str(directory), inline=True) as checkpoints:
        checkpoints.save(state, step=step).wait_durable()


def restore(state, directory):
    with Checkpointer(str(directory), inline=True) as checkpoints:
        return checkpoints.restore(state)


def dcp_state(state):
    """The same state as users of DCP give it: by fully qualified names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer, "extra": dict(state["extra"])}


def same_model(a, b):
    left, right = a["model"].state_dict(), b["model"].state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def same_optimizer(a, b):
    left, right = (x["optimizer"].state_dict()["state"] for x in (a, b))
    return (
        all(torch.equal(left[p][k], right[p][k]) for p in left for k in left[p])
        and left.keys() == right.keys()
    )
