"""Traps that other checkpointers fall into, each with what must happen instead."""

import signal

import pytest
import torch

from ckpt import Checkpointer
from ckpt.listing import newest_first
from ckpt.stores import open_store
from ftcore.base.errors import FtError
from tests.ckpt.conftest import python

STATE = {"w": torch.arange(1000.0)}


def steps(path):
    return newest_first(open_store(str(path)))


def test_retention_deletes_nothing_before_the_new_step_is_durable(tmp_path, monkeypatch):
    from ckpt.stores.file import FileStore

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path, inline=True, keep_last=1) as checkpoints:
        checkpoints.save(STATE, step=1).wait_durable(30)
        with monkeypatch.context() as broken:
            broken.setattr(FileStore, "start_upload", full)
            with pytest.raises(FtError, match="space"):
                checkpoints.save(STATE, step=2).wait_durable(30)
        assert steps(tmp_path) == [1]
        checkpoints.save(STATE, step=3).wait_durable(30)
        checkpoints.wait()
    assert steps(tmp_path) == [3]


def test_what_was_never_committed_does_not_count_as_one_of_the_last(tmp_path):
    with Checkpointer(tmp_path, inline=True, keep_last=2) as checkpoints:
        checkpoints.save(STATE, step=1).wait_durable(30)
        for abandoned in (7, 8, 9):
            (tmp_path / f"step-{abandoned:010d}").mkdir()
        checkpoints.save(STATE, step=2).wait_durable(30)
        checkpoints.wait()
        assert steps(tmp_path) == [2, 1]
        assert checkpoints.restore({"w": torch.zeros(1000)}) == 2


OVERWRITE = """
import sys, torch
from ckpt import Checkpointer
from tests.ckpt.dying import die_at
with Checkpointer(sys.argv[1], inline=True) as checkpoints:
    checkpoints.save({"w": torch.arange(1000.0)}, step=5).wait_durable(60)
    die_at(*sys.argv[2:6], 1)
    checkpoints.save({"w": -torch.arange(1000.0)}, step=5).wait_durable(60)
"""
POINTS = {
    "before its first part": ("ckpt.stores.file", "FileUpload", "put_part", "before"),
    "between data and manifest": ("ckpt.daemon.commit", "", "publish", "before"),
    "after the manifest": ("ckpt.daemon.commit", "", "publish", "after"),
}


@pytest.mark.parametrize("name", list(POINTS))
def test_killed_while_a_step_is_overwritten_the_old_or_the_new_one_is_there(tmp_path, name):
    killed = python(OVERWRITE, tmp_path, *POINTS[name], check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = {"w": torch.zeros(1000)}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        assert checkpoints.restore(found) == 5
    sign = -1 if name == "after the manifest" else 1
    assert torch.equal(found["w"], sign * STATE["w"])


def test_a_second_save_stores_the_second_values(tmp_path):
    """A cached structure must never bring the first save's weights again."""
    state = {"w": torch.zeros(1000), "nested": {"b": torch.zeros(3)}}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        for step in (1, 2):
            state["w"].fill_(step)
            state["nested"] = {"b": torch.full((3,), float(step))}  # other objects, same layout
            checkpoints.save(state, step=step).wait_durable(30)
        found = {"w": torch.zeros(1000), "nested": {"b": torch.zeros(3)}}
        checkpoints._memory = lambda: None
        assert checkpoints.restore(found) == 2
    assert found["w"][0] == 2 and found["nested"]["b"][0] == 2


def test_a_failed_save_poisons_none_of_the_three_after_it(tmp_path, monkeypatch):
    from ckpt.daemon import jobs

    def broken(*args):
        raise ConnectionResetError("the store hung up")

    with Checkpointer(tmp_path, inline=True) as checkpoints:
        with monkeypatch.context() as while_broken:
            while_broken.setattr(jobs, "upload_file", broken)
            with pytest.raises(FtError, match="hung up"):
                checkpoints.save(STATE, step=1).wait_durable(30)
        for step in (2, 3, 4):
            checkpoints.save(STATE, step=step).wait_durable(30)
    assert steps(tmp_path) == [4, 3, 2]


def test_saves_never_use_the_process_group_of_the_trainer(tmp_path, monkeypatch):
    """No collective on the save path: there is none to hang when a rank is dead."""
    import torch.distributed as dist

    def forbidden(*args, **kwargs):
        raise AssertionError("a collective on the save path")

    names = ("all_reduce", "all_gather", "broadcast", "barrier", "gather_object", "scatter")
    for name in (*names, "all_gather_object", "broadcast_object_list", "new_group"):
        monkeypatch.setattr(dist, name, forbidden)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(STATE, step=1).wait_durable(30)
        assert checkpoints.restore({"w": torch.zeros(1000)}) == 1
