"""A rank that hangs inside a step is noticed, diagnosed, given up and healed without a person."""

import subprocess
import sys

import pytest

from ftcore.daemon.hang import Guilt, accuse, limit_s
from tests.manager.jobs import Job, together


def culprit(rank, **facts):
    told = {"kind": "never_issued", "group": "ftcore", "seq": 5, "where": "train.py:3 in load"}
    sure = {"is_hanging": True, "confidence": 0.9, "because": ["it never made call 5"]}
    return {"rank": rank, **told, **sure, **facts}


def accused(culprits, *, position=1, groups=3, ranks=1):
    return accuse({"culprits": culprits}, position=position, groups=groups, ranks=ranks)


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("unfailed"), replicas_min=2) as job:
        (sha,) = {group.finish() for group in job.start_all("r0", "r1")}
    return sha


def hanging_job(folder):
    env = {"FTCORE_HANG_DIR": str(folder / "hangs")}
    return Job(folder, step_time_s=0.05, replicas_min=2, options={"hang_after_s": 1.0}, env=env)


def history(job):
    """What the lighthouse shows to people."""
    command = [sys.executable, "-m", "lighthouse", "history", "--lighthouse"]
    ran = subprocess.run([*command, job.lighthouse.address], capture_output=True, text=True)
    return ran.stdout


def test_a_hanging_rank_is_named_given_up_and_heals(tmp_path, unfailed):
    with hanging_job(tmp_path) as job:
        r0, r2 = job.start_all("r0", "r2")
        r1 = job.start("r1", hang_at=20)
        together(r0, r1, r2)
        r0.wait("step.committed", members=("r0", "r2"))
        r1.process.join(30)  # its manager has killed it
        told = history(job)
        assert "wait_for_a_batch_that_never_comes: it never made call" in told
        assert list(tmp_path.glob("hangs/default_r1/*/hang.html"))
        again = job.start("r1")
        assert {r0.finish(), r2.finish(), again.finish()} == {unfailed}
        assert again.said("heal.finished")


def test_a_rank_that_does_not_come_out_of_an_aborted_step_is_given_up(tmp_path):
    with hanging_job(tmp_path) as job:
        r0, r1 = job.start("r0"), job.start("r1", hang_at=20)
        together(r0, r1)
        r1.wait("shard", step=20)
        r0.kill()
        r1.process.join(30)
        assert "it does not come out of a step that was aborted" in history(job)


def test_the_most_patient_wait_is_for_a_first_step():
    assert limit_s(30, longest_s=0, is_first=True) == 4 * limit_s(30, longest_s=0, is_first=False)
    assert limit_s(30, longest_s=20, is_first=False) == 100


def test_a_group_judges_its_own_ranks_only():
    assert accused([culprit(0)]) is None
    guilt = accused([culprit(1)])
    assert guilt == Guilt(
        rank=0,
        call=(1, "never_issued", "ftcore", 5),
        why="hangs at train.py:3 in load: it never made call 5",
    )


def test_rank_three_of_groups_of_two_is_rank_one_of_the_second():
    guilt = accused([culprit(3)], ranks=2)
    assert guilt.rank == 1


def test_nobody_is_given_up_when_most_groups_are_late():
    assert accused([culprit(1), culprit(2)]) is None
    assert accused([culprit(1)], groups=2) is not None


@pytest.mark.parametrize("facts", [{"is_hanging": False}, {"confidence": 0.55}])
def test_nobody_is_given_up_for_less_than_a_sure_hang(facts):
    assert accused([culprit(1, **facts)]) is None
