"""SIGKILL of the trainer and of the daemon, at every named point and at random moments."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from ckpt import Checkpointer
from ckpt.listing import newest_first, read_manifest
from ckpt.stores import open_store
from ckpt.tools import verify
from tests.ckpt.conftest import ROOT, daemon_pid, python
from tests.ckpt.ranks import run_ranks

# Where to die: (module, owner or "", function, before or after the call, which call).
DAEMON_POINTS = {
    "before the first file is hashed": ("ckpt.daemon.jobs", "Job", "_hash", "before", 1),
    "before a part is written": ("ckpt.stores.file", "FileUpload", "put_part", "before", 1),
    "after a part is written": ("ckpt.stores.file", "FileUpload", "put_part", "after", 1),
    "before a file gets its name": ("ckpt.stores.file", "FileUpload", "finish", "before", 1),
    "after a file got its name": ("ckpt.stores.file", "FileUpload", "finish", "after", 1),
    "before the manifest": ("ckpt.daemon.commit", "", "publish", "before", 1),
    "inside the manifest": ("ckpt.stores.file", "FileUpload", "finish_if_absent", "before", 2),
    "after the manifest": ("ckpt.daemon.commit", "", "publish", "after", 1),
    "before retention": ("ckpt.daemon.host", "Host", "retain", "before", 1),
    "inside a delete": ("ckpt.daemon.target", "Target", "delete_prefix", "before", 1),
}
TRAINER_POINTS = {
    "before a slot is taken": ("ckpt.saver", "Saver", "_prepare", "before", 2),
    "before the daemon knows": ("ckpt.saver", "Saver", "_begin", "before", 2),
    "after the daemon knows": ("ckpt.saver", "Saver", "_begin", "after", 2),
    "after a file is copied": ("ckpt.saver", "Saver", "_staged", "after", 3),
    "before it is sealed": ("ckpt.saver", "Saver", "_seal", "before", 2),
    "after it is sealed": ("ckpt.saver", "Saver", "_seal", "after", 2),
}
RANK_POINTS = {
    "before the daemon knows": ("Saver", "_begin", "before"),
    "after the daemon knows": ("Saver", "_begin", "after"),
    "after a file is copied": ("Saver", "_staged", "after"),
    "before it is sealed": ("Saver", "_seal", "before"),
    "after it is sealed": ("Saver", "_seal", "after"),
}
DIE = "import sys\nfrom tests.ckpt.dying import die_at\n"
TRAIN = (
    DIE
    + """
import torch
from ckpt import Checkpointer
if len(sys.argv) > 4:
    die_at(*sys.argv[4:8], int(sys.argv[8]))
with Checkpointer(sys.argv[1], keep_last=1, linger_s=30) as checkpoints:
    state = {"w": torch.zeros(1 << 18), "step": -1}
    checkpoints.restore(state)
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        state["w"].fill_(step)
        state["step"] = step
        handle = checkpoints.save(state, step=step)
        handle.wait_durable(60)
        print("DURABLE", step, flush=True)
"""
)


def start_daemon_that_dies(runtime, point):
    code = DIE + f"die_at(*{point!r})\nfrom ckpt.daemon.__main__ import main\nmain()"
    with open(runtime / "daemon.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--linger-s", "30"], cwd=ROOT, stdout=log, stderr=log
        )
    while not list(runtime.glob("*.sock")):
        assert process.poll() is None, (runtime / "daemon.log").read_text()
        time.sleep(0.01)
    return process


def assert_whole(path, *, at_least):
    """The newest committed step verifies, is not mixed, and is not older than what was promised."""
    store = open_store(str(path))
    steps = newest_first(store)
    assert steps and steps[0] >= at_least, (steps, at_least)
    for step in steps:
        assert verify(store, step, deep=True).is_good
    found = {"w": torch.full((1 << 18,), -5.0), "step": -5}
    with Checkpointer(path, inline=True) as checkpoints:
        step = checkpoints.restore(found)
    assert step == steps[0] == found["step"] and bool((found["w"] == step).all())


def assert_no_junk(path):
    """After the next save nothing lies about that no manifest names."""
    store = open_store(str(path))
    manifests = [read_manifest(store, step) for step in newest_first(store)]
    named = {f"step-{m.step:010d}/{f.key}" for m in manifests for f in m.files}
    present = {p.relative_to(path).as_posix() for p in path.glob("step-*/*")}
    assert {p for p in present if not p.endswith("manifest.ckpt")} == named


@pytest.mark.parametrize("name", list(DAEMON_POINTS))
def test_a_daemon_killed_at_a_named_point_loses_nothing(tmp_path, runtime, name):
    path = tmp_path / "run"
    with Checkpointer(path, inline=True, keep_last=1) as checkpoints:
        state = {"w": torch.zeros(1 << 18), "step": 0}
        checkpoints.save(state, step=0).wait_durable(30)
    process = start_daemon_that_dies(runtime, DAEMON_POINTS[name])
    with Checkpointer(path, keep_last=1) as checkpoints:
        for step in (1, 2):
            state = {"w": torch.full((1 << 18,), float(step)), "step": step}
            started = time.monotonic()
            checkpoints.save(state, step=step).wait_durable(60)
            assert time.monotonic() - started < 30
    assert process.wait(30) == -signal.SIGKILL
    assert_whole(path, at_least=2)
    assert_no_junk(path)


@pytest.mark.parametrize("name", list(TRAINER_POINTS))
def test_a_trainer_killed_at_a_named_point_leaves_a_whole_step(tmp_path, name):
    path = tmp_path / "run"
    killed = python(TRAIN, path, 0, 5, *TRAINER_POINTS[name], check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert_whole(path, at_least=killed.stdout.count("DURABLE") - 1)
    with Checkpointer(path, keep_last=1) as checkpoints:
        state = {"w": torch.full((1 << 18,), 5.0), "step": 5}
        checkpoints.save(state, step=5).wait_durable(60)
    assert_whole(path, at_least=5)
    assert_no_junk(path)


@pytest.mark.parametrize("name", list(RANK_POINTS))
def test_a_rank_killed_at_a_named_point_is_replaced_by_a_replica(tmp_path, name):
    path = tmp_path / "run"
    (code, output), (killed, _) = run_ranks("one_dies_at", 2, path, *RANK_POINTS[name], check=False)
    assert code == 0 and killed == -signal.SIGKILL, output
    assert newest_first(open_store(str(path))) == [2, 1]
    assert all(verify(open_store(str(path)), step, deep=True).is_good for step in (1, 2))


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments_the_newest_step_always_loads(tmp_path, runtime, seed):
    rng = random.Random(seed)
    path, promised = tmp_path / "run", -1
    for life in range(2):
        code = [sys.executable, "-c", TRAIN, str(path), str(promised + 1), "1000"]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(code, cwd=ROOT, **pipes) as trainer:
            for _ in range(rng.randint(1, 8)):
                promised = int(trainer.stdout.readline().split()[1])
            time.sleep(rng.uniform(0, 0.02))
            victims = [trainer.pid, daemon_pid(runtime)]
            for pid in rng.sample(victims, rng.randint(1, 2)) if life else victims:
                os.kill(pid, signal.SIGKILL)
            trainer.kill()
        assert_whole(path, at_least=promised)
