"""Slow uploads, full disks, second trainers, several destinations, wrong clocks."""

import os
import subprocess
import time

import pytest
import torch

from ckpt import Checkpointer
from ckpt.errors import Fenced, SaveSkipped
from ckpt.listing import newest_first
from ckpt.stores import open_store
from ckpt.tools import verify
from ftcore.base.errors import FtError
from tests.ckpt.conftest import daemon_pid, kill_daemon, make_state, same, snapshot

STATE = {"w": torch.arange(1 << 20, dtype=torch.float32)}  # 4 MB
SLOW = 20e6  # bytes a second: each save takes a fifth of a second


def test_skip_drops_saves_while_an_upload_is_under_way(tmp_path):
    with Checkpointer(tmp_path, inline=True, when_busy="skip", bytes_per_s=SLOW) as checkpoints:
        handles = [checkpoints.save(STATE, step=s) for s in range(1)]
        handles[0].wait_staged(30)
        handles.append(checkpoints.save(STATE, step=1))
        with pytest.raises(SaveSkipped):
            handles[1].wait_durable(30)
        handles[0].wait_durable(30)
        checkpoints.wait()
        checkpoints.save(STATE, step=2).wait_durable(30)
    assert newest_first(open_store(str(tmp_path))) == [2, 0]


def test_newest_replaces_a_save_whose_upload_has_not_begun(tmp_path):
    with Checkpointer(tmp_path, inline=True, when_busy="newest", bytes_per_s=SLOW) as checkpoints:
        handles = []
        for step in range(3):
            handles.append(checkpoints.save(STATE, step=step))
            handles[-1].wait_staged(30)
        handles[2].wait_durable(30)
        with pytest.raises(FtError, match="took its place"):
            handles[1].wait_durable(30)
        handles[0].wait_durable(30)


def test_wait_keeps_every_save(tmp_path):
    with Checkpointer(tmp_path, inline=True, bytes_per_s=SLOW) as checkpoints:
        handles = [checkpoints.save(STATE, step=s) for s in range(4)]
        for handle in handles:
            handle.wait_durable(30)
    assert newest_first(open_store(str(tmp_path))) == [3, 2, 1, 0]


def test_an_upload_limit_is_held(tmp_path):
    with Checkpointer(tmp_path, inline=True, bytes_per_s=SLOW) as checkpoints:
        started = time.monotonic()
        for step in range(3):
            checkpoints.save(STATE, step=step).wait_durable(30)
        assert time.monotonic() - started > 0.9 * (12e6 - 2e6) / SLOW


def test_memory_stays_flat_over_many_saves(tmp_path):
    with Checkpointer(tmp_path, inline=True, keep_last=1) as checkpoints:
        regions = set()
        for step in range(50):
            checkpoints.save(STATE, step=step).wait_durable(30)
            regions |= {s.region.fd for s in checkpoints._saver.slots.regions()}
        assert len(regions) == 1
        checkpoints.wait()
    assert newest_first(open_store(str(tmp_path))) == [49]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_named_cleaned_up_and_harms_nothing(small_disk):
    with Checkpointer(small_disk, inline=True) as checkpoints:
        checkpoints.save(STATE, step=1).wait_durable(30)
        with pytest.raises(FtError, match=str(small_disk)) as failure:
            checkpoints.save(STATE, step=2).wait_durable(30)
        assert "space" in str(failure.value).lower() and failure.value.remedy
        checkpoints.wait()
        assert not list(small_disk.glob("step-0000000002/*"))
        (small_disk / "step-0000000001").rename(small_disk / "old")
        for file in (small_disk / "old").iterdir():
            file.unlink()
        checkpoints.save(STATE, step=3).wait_durable(30)
    assert verify(open_store(str(small_disk)), 3, deep=True).is_good


def test_a_second_trainer_on_the_same_directory_fences_the_first(tmp_path):
    first = Checkpointer(tmp_path, inline=True)
    first.save(STATE, step=1).wait_durable(30)
    second = Checkpointer(tmp_path, inline=True)
    second.save(STATE, step=2).wait_durable(30)
    with pytest.raises(Fenced, match="taken over"):
        first.save(STATE, step=3).wait_durable(30)
    second.save(STATE, step=4).wait_durable(30)
    first.close()
    second.close()
    assert newest_first(open_store(str(tmp_path))) == [4, 2, 1]


def test_a_clock_that_jumps_back_changes_neither_order_nor_retention(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, inline=True, keep_last=2) as checkpoints:
        real = time.time
        for step, offset in ((1, 0.0), (2, -1e6), (3, 1e6)):
            monkeypatch.setattr(time, "time", lambda o=offset: real() + o)
            checkpoints.save(STATE, step=step).wait_durable(30)
        checkpoints.wait()
    assert newest_first(open_store(str(tmp_path))) == [3, 2]


def test_two_destinations_both_get_every_step_and_the_first_is_read(tmp_path):
    places = [tmp_path / "near", tmp_path / "far"]
    state = make_state(1)
    with Checkpointer(places, inline=True) as checkpoints:
        handle = checkpoints.save(state, step=1)
        assert set(handle.wait_durable(30)) == set(map(str, places))
    found = make_state(2)
    with Checkpointer(places, inline=True) as checkpoints:
        checkpoints.restore(found)
        assert checkpoints.last_restored.tier == str(places[0])
    (next(places[0].glob("step-*/*.safetensors"))).unlink()
    with Checkpointer(places, inline=True) as checkpoints:
        checkpoints.restore(found)
        assert checkpoints.last_restored.tier == str(places[1])
        assert "near" in checkpoints.last_restored.skipped[0]
    assert same(snapshot(found), snapshot(state))


def test_a_memory_store_serves_tests():
    with Checkpointer("memory://run", inline=True) as checkpoints:
        checkpoints.save(STATE, step=1).wait_durable(30)
        found = {"w": torch.zeros(1 << 20)}
        checkpoints._memory = lambda: None
        assert checkpoints.restore(found) == 1
    assert torch.equal(found["w"], STATE["w"])


def test_metrics_tell_bytes_failures_age_and_lost_time(tmp_path):
    from ckpt.client import _inline_hosts

    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(STATE, step=7).wait_durable(30)
        checkpoints.save(STATE, step=8).wait_durable(30)
        text = _inline_hosts[0].metrics.exposition()
    tier = f'{{tier="{tmp_path}"}}'
    assert f"ft_ckpt_durable_step{tier} 8" in text
    for name in ("bytes_total", "seconds_total", "durable_age_seconds", "lost_seconds_total"):
        assert f"# HELP ft_ckpt_{name}" in text


def test_a_destination_that_cannot_be_opened_fails_alone(tmp_path):
    with Checkpointer(["no-such-scheme://x", tmp_path], inline=True) as checkpoints:
        handle = checkpoints.save(STATE, step=1)
        with pytest.raises(FtError, match="no-such-scheme"):
            handle.wait_durable(30, url="no-such-scheme://x")
        handle.wait_durable(30, url=str(tmp_path))


def test_a_daemon_killed_in_waves_fails_that_save_and_not_the_next(tmp_path, runtime):
    state = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(16)}  # 16 MB
    options = {"staging_bytes_max": 8 << 20, "bytes_per_s": 8e6}
    with Checkpointer(tmp_path, **options) as checkpoints:
        handle = checkpoints.save(state, step=1)
        while daemon_pid(runtime) is None or not list(tmp_path.glob("step-*/*")):
            time.sleep(0.005)
        kill_daemon(runtime)
        with pytest.raises(FtError, match="in waves"):
            handle.wait_durable(60)
        checkpoints.save(state, step=2).wait_durable(60)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        assert checkpoints.restore(found) == 2
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_answer_that_is_lost_after_the_commit_is_no_failure(tmp_path, monkeypatch):
    from ckpt.daemon import commit

    real = commit.publish

    def lost(target, manifest, data):
        real(target, manifest, data)
        raise ConnectionResetError("the answer was lost")

    monkeypatch.setattr(commit, "publish", lost)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(STATE, step=1).wait_durable(30)
    assert verify(open_store(str(tmp_path)), 1, deep=True).is_good
