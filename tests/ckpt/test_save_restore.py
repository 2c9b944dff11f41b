"""Save and restore on a local disk, through a real daemon."""

import os
import signal

import pytest
import torch

from ckpt import Checkpointer, per_rank
from ckpt.errors import SaveFailed, StagingTorn, StateMismatch
from ftcore.base.errors import FtError
from tests.ckpt.conftest import (
    daemon_pid,
    kill_daemon,
    make_state,
    same,
    snapshot,
    train,
)


def test_what_was_saved_is_restored_by_another_trainer(tmp_path):
    state = make_state(1)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=7, metrics={"loss": 0.5}).wait_durable(30)
    fresh = make_state(2)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore(fresh) == 7
        assert checkpoints.last_restored.metrics == {"loss": 0.5}
    assert same(snapshot(fresh), snapshot(state))


def test_an_optimizer_that_never_stepped_gets_its_state(tmp_path):
    state = make_state(1)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(state, step=1).wait_durable(30)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 3))
        fresh = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "extra": {}}
        checkpoints.restore(fresh)
    assert same(snapshot(fresh), snapshot(state))


def test_an_empty_directory_restores_nothing(tmp_path):
    with Checkpointer(tmp_path / "new", inline=True) as checkpoints:
        assert checkpoints.restore(make_state()) is None


def test_values_that_are_no_objects_are_put_into_the_mapping(tmp_path):
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        saved = {"step": 3, "names": ["a", "b"], "mixed": {1: (2.5, None), "t": {"x"}}, "b": b"\0"}
        checkpoints.save(saved, step=1).wait_durable(30)
        fresh = {"step": 0, "names": [], "mixed": {}, "b": b""}
        checkpoints.restore(fresh)
    assert fresh == saved


def test_the_optimizer_waits_until_the_state_is_staged(tmp_path):
    state = make_state(1)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        for step in range(20):
            expected = snapshot(state)
            handle = checkpoints.save(state, step=step)
            train(state)  # must not tear what is being copied
            handle.wait_durable(30)
            found = make_state(99)
            checkpoints.restore(found, step=step)
            assert same(snapshot(found), expected)


def test_a_write_during_staging_fails_the_save_and_not_the_next(tmp_path):
    state = {"w": torch.zeros(64 << 20)}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        handle = checkpoints.save(state, step=1)
        state["w"].add_(1)
        with pytest.raises(StagingTorn, match="w"):
            handle.wait_staged(30)
        checkpoints.save(state, step=2).wait_durable(60)
        assert checkpoints.restore({"w": torch.empty(64 << 20)}) == 2


def test_a_type_that_cannot_be_saved_is_refused_at_save_with_its_path(tmp_path):
    with (
        Checkpointer(tmp_path, inline=True) as checkpoints,
        pytest.raises(FtError, match=r"extra\.hook"),
    ):
        checkpoints.save({"extra": {"hook": lambda: None}}, step=1)


def test_a_second_save_with_the_same_layout_plans_nothing(tmp_path):
    state = make_state(1)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        for step in range(3):
            checkpoints.save(state, step=step).wait_durable(30)
        assert checkpoints._planner.plans == 1


def test_a_changed_type_is_planned_anew(tmp_path):
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save({"w": torch.ones(8)}, step=1).wait_durable(30)
        checkpoints.save({"w": torch.ones(8, dtype=torch.int64)}, step=2).wait_durable(30)
        found = {"w": torch.zeros(8, dtype=torch.int64)}
        assert checkpoints.restore(found) == 2
    assert found["w"].tolist() == [1] * 8


def test_overwriting_a_step_keeps_the_old_one_until_the_new_one_is_there(tmp_path):
    first, second = make_state(1), make_state(2)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(first, step=5).wait_durable(30)
        checkpoints.save(second, step=5).wait_durable(30)
        checkpoints.wait()
        found = make_state(3)
        checkpoints.restore(found)
    assert same(snapshot(found), snapshot(second))
    assert len(list((tmp_path / "step-0000000005").glob("*.safetensors"))) == 1


def test_a_view_of_a_large_storage_costs_its_own_bytes(tmp_path):
    big = torch.zeros(32 << 20)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        durable = checkpoints.save({"view": big[5:15]}, step=1).wait_durable(30)
        assert sum(d.bytes for d in durable.values()) < 64 << 10
        assert sum(s.region.size for s in checkpoints._saver.slots.regions()) < 1 << 20


def test_tied_tensors_are_stored_once_and_restored_tied(tmp_path):
    shared = torch.randn(1 << 18)
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        durable = checkpoints.save({"a": shared, "b": shared}, step=1).wait_durable(30)
        assert sum(d.bytes for d in durable.values()) < 1.1 * shared.nbytes
        found = {"a": torch.empty(1 << 18), "b": torch.empty(1 << 18)}
        checkpoints.restore(found)
    assert torch.equal(found["a"], shared) and torch.equal(found["b"], shared)


def test_a_mismatch_is_reported_before_anything_is_changed(tmp_path):
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save({"a": torch.ones(4), "b": torch.ones(2)}, step=1).wait_durable(30)
        found = {"a": torch.zeros(4), "b": torch.zeros(3), "c": torch.zeros(1)}
        with pytest.raises(StateMismatch, match=r"1 missing \(c\); 1 mismatched \(b"):
            checkpoints.restore(found)
        assert not any(t.any() for t in found.values())
        partial = {"a": torch.zeros(4), "c": torch.zeros(1)}
        with pytest.raises(StateMismatch, match=r"1 unexpected \(b\)"):
            checkpoints.restore(partial)
        assert checkpoints.restore(partial, strict=False) == 1
        assert partial["a"].tolist() == [1] * 4 and partial["c"].tolist() == [0]


def test_a_partial_load_takes_only_what_was_asked(tmp_path):
    saved = {"a": {"x": torch.ones(4), "n": 1}, "b": {"x": torch.ones(4), "n": 1}}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(saved, step=1).wait_durable(30)
        found = {"a": {"x": torch.zeros(4), "n": 0}, "b": {"x": torch.zeros(4), "n": 0}}
        checkpoints.restore(found, only="a.")
    assert found["a"]["x"].all() and found["a"]["n"] == 1
    assert not found["b"]["x"].any() and found["b"]["n"] == 0


def test_per_rank_values_come_back(tmp_path):
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        rng = torch.get_rng_state()
        checkpoints.save({"rng": per_rank({"torch": rng})}, step=1).wait_durable(30)
        found = {"rng": per_rank({"torch": torch.zeros_like(rng)})}
        checkpoints.restore(found)
    assert torch.equal(found["rng"].value["torch"], rng)


def test_a_killed_daemon_is_respawned_and_finishes_what_was_staged(tmp_path, runtime):
    state = make_state(1)
    with Checkpointer(tmp_path, bytes_per_s=20_000) as checkpoints:
        handle = checkpoints.save(state, step=1)
        handle.wait_staged(30)
        first = daemon_pid(runtime)
        kill_daemon(runtime)
        handle.wait_durable(30)
        assert daemon_pid(runtime) != first
        checkpoints.save(state, step=2).wait_durable(30)
        assert checkpoints.restore(make_state(2)) == 2


def test_a_disk_that_is_not_writable_is_named_and_the_next_save_succeeds(tmp_path):
    blocked = tmp_path / "run"
    blocked.write_text("a file where the directory should be")
    with Checkpointer(blocked, inline=True) as checkpoints:
        with pytest.raises(FtError, match="run"):
            checkpoints.save(make_state(1), step=1).wait_durable(30)
        blocked.unlink()
        checkpoints.save(make_state(1), step=2).wait_durable(30)
        assert checkpoints.restore(make_state(2)) == 2


def test_a_save_that_fails_at_one_destination_is_durable_at_the_other(tmp_path):
    (tmp_path / "bad").write_text("")
    with Checkpointer([tmp_path / "bad", tmp_path / "good"], inline=True) as checkpoints:
        handle = checkpoints.save(make_state(1), step=1)
        with pytest.raises(FtError):
            handle.wait_durable(30)
        assert handle.durable_at == (str(tmp_path / "good"),)
        assert checkpoints.restore(make_state(2)) == 1


def test_bounded_staging_memory_holds_its_budget(tmp_path):
    state = {f"w{i}": torch.randn(1 << 20) for i in range(32)}  # 128 MB
    budget = 32 << 20
    with Checkpointer(tmp_path, inline=True, staging_bytes_max=budget) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, step=step).wait_durable(60)
        assert sum(s.region.size for s in checkpoints._saver.slots.regions()) <= budget
        found = {k: torch.empty_like(v) for k, v in state.items()}
        assert checkpoints.restore(found) == 2
    assert all(torch.equal(found[k], state[k]) for k in state)


def test_a_trainer_killed_after_staging_loses_nothing(tmp_path, runtime):
    code = """
import os, signal, sys, torch
from ckpt import Checkpointer
c = Checkpointer(sys.argv[1], bytes_per_s=8_000_000, linger_s=60)
c.save({"w": torch.arange(1 << 20)}, step=3).wait_staged(30)
os.kill(os.getpid(), signal.SIGKILL)
"""
    from tests.ckpt.conftest import python

    result = python(code, tmp_path, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    found = {"w": torch.zeros(1 << 20, dtype=torch.int64)}
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore(found) == 3
        assert checkpoints.last_restored.tier == "memory"
    assert torch.equal(found["w"], torch.arange(1 << 20))
    manifest = tmp_path / "step-0000000003" / "manifest.ckpt"
    for _ in range(3000):
        if manifest.exists():
            break
        os.sched_yield()
        signal.sigtimedwait([], 0.01)
    assert manifest.exists(), (runtime / "daemon.log").read_text()


def test_a_stock_dcp_checkpoint_in_the_place_of_steps_is_read(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.arange(6.0), "b": {"x": torch.ones(2)}}, checkpoint_id=tmp_path)
    found = {"w": torch.zeros(6), "b": {"x": torch.zeros(2)}}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        assert checkpoints.restore(found) == 0
        checkpoints.save(found, step=5).wait_durable(30)
        assert checkpoints.restore(found) == 5
    assert found["w"].tolist() == [0, 1, 2, 3, 4, 5] and found["b"]["x"].all()


def test_the_error_of_a_failed_save_has_a_remedy(tmp_path):
    error = SaveFailed("x")
    assert error.remedy.endswith(".")
