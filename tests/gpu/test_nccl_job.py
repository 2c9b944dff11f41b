"""Whole jobs over NCCL, ranks sharing a GPU: `python -m pytest -s tests/gpu/test_nccl_job.py`."""

import subprocess
import sys
import time

import pytest

from ftcore.process_group.nccl import nccl_is_available
from tests.gpu import trainer
from tests.manager.jobs import HANG_S, Job, together

pytestmark = pytest.mark.skipif(not nccl_is_available(), reason="NCCL and a GPU are needed")
LIVES = iter(range(1000))


def job(folder, **config):
    settings = {"step_time_s": 0.05, "replicas_min": 1, "main": trainer.main, **config}
    folder.mkdir(exist_ok=True)
    return Job(folder, **settings)


def history(running):
    command = [sys.executable, "-m", "lighthouse", "history", "--lighthouse"]
    ran = subprocess.run([*command, running.lighthouse.address], capture_output=True, text=True)
    return ran.stdout


def unfailed(folder, start, *names, **config):
    """The final weights of a job without failures, of each rank of a group."""
    with job(folder, replicas_min=len(names), **config) as running:
        groups = [start(running, name) for name in names]
        found = {tuple(rank.finish() for rank in ranks) for ranks in groups}
    (weights,) = found
    return weights


def one_rank(running, name, **config):
    return [running.start(name, **config)]


def two_ranks(running, name):
    """FSDP2 over two ranks inside one replica group."""
    meeting = str(running.folder / f"meeting-{next(LIVES)}")
    return [running.start(name, rank=rank, ranks=2, meeting=meeting) for rank in range(2)]


def test_a_hanging_rank_is_named_given_up_and_heals(tmp_path):
    expected = unfailed(tmp_path / "unfailed", one_rank, "r0", "r1")
    env = {"FTCORE_HANG_DIR": str(tmp_path / "hangs")}
    options = {"hang_after_s": 2.0}
    with job(tmp_path / "failed", replicas_min=2, env=env, options=options) as running:
        r0, r2 = running.start("r0"), running.start("r2")
        r1 = running.start("r1", hang_at=20)
        together(r0, r1, r2)
        r1.wait("shard", step=20)
        hung_at = time.time()
        went_on = r0.wait("step.committed", members=("r0", "r2"))["at"]
        r1.process.join(HANG_S)  # its manager has killed it
        told = history(running)
        print(f"\nhang to the others' next commit: {went_on - hung_at:.2f} s\n{told}")
        assert "wait_for_a_batch_that_never_comes: it never made call" in told
        again = running.start("r1")
        assert {(g.finish(),) for g in (r0, r2, again)} == {expected}
        assert again.said("heal.finished")


def test_a_rank_of_an_fsdp2_group_is_killed_and_the_bits_are_the_same(tmp_path):
    expected = unfailed(tmp_path / "unfailed", two_ranks, "r0", "r1")
    with job(tmp_path / "failed") as running:
        r0, r1 = two_ranks(running, "r0"), two_ranks(running, "r1")
        together_as_groups(r0, r1)
        r1[1].wait("shard")
        killed_at = time.time()
        r1[1].kill()
        went_on = max(rank.wait("step.committed", members=("r0",))["at"] for rank in r0)
        print(f"\nkill to the other group's next commit: {went_on - killed_at:.3f} s")
        r1[0].kill()  # as torchrun does with what is left of a group
        again = two_ranks(running, "r1")
        assert {tuple(rank.finish() for rank in ranks) for ranks in (r0, again)} == {expected}
        assert all(rank.said("heal.finished") for rank in again)


def together_as_groups(*groups):
    names = tuple(ranks[0].name for ranks in groups)
    for rank in (rank for ranks in groups for rank in ranks):
        rank.wait("step.committed", members=names)
