"""A daemon of its own for each test, and a small training state."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    """A runtime directory with a short name; its daemon is stopped by its pid at the end."""
    path = tempfile.mkdtemp(prefix="ckpt-rt-", dir="/tmp")
    monkeypatch.setenv("CKPT_RUNTIME_DIR", path)
    yield Path(path)
    kill_daemon(Path(path))
    shutil.rmtree(path, ignore_errors=True)


def daemon_pid(runtime):
    """The pid that the daemon logged, or None."""
    log = runtime / "daemon.log"
    if not log.exists():
        return None
    started = [line for line in log.read_text().splitlines() if "daemon.started" in line]
    return int(started[-1].split("pid=")[1].split()[0]) if started else None


def kill_daemon(runtime, signum=signal.SIGKILL):
    pid = daemon_pid(runtime)
    if pid is not None:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass


def make_state(seed=0, width=32):
    """A trained little model with Adam and a few plain values."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 3))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "extra": {"epoch": seed, "name": "run"}}
    train(state)
    return state


def train(state):
    model = state["model"]
    model(torch.randn(2, model[0].in_features)).sum().backward()
    state["optimizer"].step()


def snapshot(state):
    """Everything of a state, copied."""
    model, optimizer = state["model"].state_dict(), state["optimizer"].state_dict()["state"]
    tensors = {k: v.clone() for k, v in model.items()}
    tensors |= {f"{i}.{k}": v.clone() for i, s in optimizer.items() for k, v in s.items()}
    return tensors, dict(state["extra"])


def same(a, b):
    tensors_a, extra_a = a
    tensors_b, extra_b = b
    return (
        extra_a == extra_b
        and tensors_a.keys() == tensors_b.keys()
        and all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)
    )


@pytest.fixture
def run(tmp_path):
    """A directory for a run, with steps 1 and 2 saved; `run.saved` has both states."""
    saved = {}
    path = tmp_path / "run"
    with Checkpointer(path, inline=True) as checkpoints:
        for step in (1, 2):
            state = make_state(step)
            saved[step] = snapshot(state)
            checkpoints.save(state, step=step).wait_durable(30)
    return Run(path, saved)


class Run:
    def __init__(self, path, saved):
        self.path, self.saved = path, saved

    def files(self, step):
        return sorted((self.path / f"step-{step:010d}").glob("*.safetensors"))

    def manifest(self, step):
        return self.path / f"step-{step:010d}" / "manifest.ckpt"


def python(code, *args, env=None, check=True, timeout=120):
    """Run Python code in a process of its own, from the root of the repository."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=check,
        timeout=timeout,
    )
