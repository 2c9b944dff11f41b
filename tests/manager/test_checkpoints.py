"""Groups that save together: all are lost, and the job goes on with the same bits."""

import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt.listing import newest_first, read_manifest
from ckpt.stores import open_store
from ckpt.tools import verify
from ftcore.demo.processes import kill_checkpoint_daemon
from tests.manager.jobs import Job, together

SLOW = {"step_time_s": 0.15}  # so that all groups are there long before the end


@pytest.fixture
def daemon(monkeypatch):
    """The folder of a checkpoint daemon of its own for this test."""
    with daemon_folder() as folder:
        monkeypatch.setenv("CKPT_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture
def other_host():
    with daemon_folder() as folder:
        yield folder


@contextmanager
def daemon_folder():
    with tempfile.TemporaryDirectory(prefix="ckpt-") as name:
        yield Path(name)
        kill_checkpoint_daemon(Path(name))


@pytest.fixture
def job(tmp_path, daemon):
    """A job of 60 steps that saves every ten of them and keeps all."""
    with Job(
        tmp_path,
        steps=60,
        data=1000,
        checkpoints=str(tmp_path / "run"),
        options={"checkpoint_every": 10},
        env={"CKPT_RUNTIME_DIR": str(daemon)},
    ) as job:
        job.run = tmp_path / "run"
        yield job


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    """The weights of that job without a failure, without checkpoints, by one group."""
    with Job(tmp_path_factory.mktemp("unfailed"), steps=60, data=1000) as job:
        return job.start("only").finish()


def steps_of(job):
    return newest_first(open_store(str(job.run)))


def samples_of(*groups):
    """Samples by (step, shard), as they were taken last."""
    said = [e for g in groups for e in g.said("shard")]
    return {(e["step"], e["shard"]): e["samples"] for e in said}


def test_all_groups_are_killed_with_the_daemon_and_the_bits_are_the_same(job, daemon, unfailed):
    groups = job.start_all("r0", "r1", "r2", **SLOW)
    together(*groups)
    groups[0].wait("shard", step=34)
    for group in groups:
        group.kill()
    kill_checkpoint_daemon(daemon)
    newest = steps_of(job)[0]
    again = job.start_all("r0", "r1", "r2")
    assert {g.finish() for g in again} == {unfailed}
    restored = [e["step"] for g in again for e in g.said("checkpoint.restored")]
    assert newest in (20, 30) and restored and set(restored) == {newest}
    assert steps_of(job)[0] == 60
    assert all(verify(open_store(str(job.run)), step, deep=True).is_good for step in steps_of(job))


def test_the_samples_after_the_loss_are_those_that_would_have_come(job, daemon):
    groups = job.start_all("r0", "r1", **SLOW)
    together(*groups)
    groups[0].wait("shard", step=25)
    for group in groups:
        group.kill()
        group.wait("ended")
    kill_checkpoint_daemon(daemon)
    alone = job.start("r0")
    alone.finish()
    taken = samples_of(*groups) | samples_of(alone)
    in_order = [s for key in sorted(taken) for s in taken[key]]
    assert len(set(in_order)) == len(in_order) == 60 * 3 * 2  # each exactly once


def test_processes_that_are_killed_restart_from_the_memory_of_the_daemon(job, unfailed):
    groups = job.start_all("r0", "r1", **SLOW)
    together(*groups)
    groups[0].wait("checkpoint.saved", step=20)
    groups[0].wait("shard", step=22)
    for group in groups:
        group.kill()
    again = job.start_all("r0", "r1")
    assert {g.finish() for g in again} == {unfailed}
    restored = [e for g in again for e in g.said("restored")]
    assert {e["tier"] for e in restored} == {"memory"}


def test_each_group_writes_its_part_and_nothing_is_written_twice(job):
    for group in job.start_all("r0", "r1", "r2", width=512, **SLOW):
        group.finish()
    manifest = read_manifest(open_store(str(job.run)), 60)
    logical = sum(p.nbytes for t in manifest.tensors.values() for p in t.pieces)
    assert manifest.participants == 3
    assert len({file.key.split("-")[1] for file in manifest.files}) == 3
    assert manifest.stored_bytes < 1.2 * logical + 3 * 65536


def test_a_group_that_dies_in_between_is_healed_and_the_others_save_without_it(job, unfailed):
    r0, r1, r2 = job.start_all("r0", "r1", "r2", **SLOW)
    together(r0, r1, r2)
    r1.kill()
    r0.wait("step.committed", members=("r0", "r2"))
    saved = r0.wait("checkpoint.saved")["step"]
    again = job.start("r1")
    assert {r0.finish(), r2.finish(), again.finish()} == {unfailed}
    assert steps_of(job) == [60, 50, 40, 30, 20, 10]
    assert read_manifest(open_store(str(job.run)), saved).participants == 2


def test_a_group_that_heals_needs_no_checkpoint(job, other_host, unfailed):
    job.config["options"] = {"checkpoint_every": 60}  # nothing is there to restore until the end
    r0 = job.start("r0", **SLOW)
    r0.wait("step.committed")
    r1 = job.start("r1", env={"CKPT_RUNTIME_DIR": str(other_host)})
    assert {r0.finish(), r1.finish()} == {unfailed}
    assert r1.said("heal.finished") and not r1.said("checkpoint.restored")
    assert read_manifest(open_store(str(job.run)), 60).participants == 2  # they met in the store


def test_groups_with_different_checkpoints_are_refused(job):
    r0 = job.start("r0", **SLOW)
    r0.wait("step.committed")
    error = job.start("r1", checkpoints=str(job.folder / "elsewhere")).wait("error")
    assert "checkpoints is every 10 to" in error["what"] and error["remedy"]
    r0.finish()


def test_a_group_killed_in_the_middle_of_a_save_is_replaced_by_another(job, unfailed):
    """r1 dies between its last commit and its part of the save: the step is committed anyway."""
    r0, r1 = job.start_all("r0", "r1", **SLOW)
    together(r0, r1)
    r1.wait("step.committed", step=19)
    r1.kill()
    again = job.start("r1", **SLOW)
    assert {r0.finish(), again.finish()} == {unfailed}
    assert 20 in steps_of(job)


def test_sigterm_saves_the_step_that_it_finds_and_leaves_in_good_order(job, daemon, unfailed):
    groups = job.start_all("r0", "r1", **SLOW)
    together(*groups)
    groups[0].wait("shard", step=24)
    for group in groups:
        group.signal(signal.SIGTERM)
    ended = [group.wait("ended_loop") for group in groups]
    assert all("SIGTERM" in e["why"] for e in ended)
    noticed = [e for g in groups for e in g.said("checkpoint.noticed")]
    assert len(noticed) >= 2 and all(e["durable"] for e in noticed)
    assert steps_of(job)[0] == max(e["step"] for e in noticed) >= 24
    kill_checkpoint_daemon(daemon)
    again = job.start_all("r0", "r1")
    assert {g.finish() for g in again} == {unfailed}


def test_another_lighthouse_without_memory_takes_the_job_back(job, daemon, unfailed):
    groups = job.start_all("r0", "r1", **SLOW)
    together(*groups)
    last = groups[0].wait("step.committed")["quorum"]
    groups[0].wait("shard", step=15)
    for group in groups:
        group.kill()
    job.kill_lighthouse()
    os.unlink(job.folder / "lighthouse.journal")
    job.restart_lighthouse()
    again = job.start_all("r0", "r1")
    assert {g.finish() for g in again} == {unfailed}
    first = again[0].said("step.committed")[0]["quorum"]
    assert number(first) > number(last)  # ids go on, though nobody remembers them


def number(quorum):
    return tuple(map(int, quorum.split(".")))


def test_a_store_that_fails_costs_training_nothing(job, unfailed):
    job.run.write_text("a file where the directory should be")
    group = job.start("r0")
    assert group.finish() == unfailed
    assert group.said("checkpoint.failed")
