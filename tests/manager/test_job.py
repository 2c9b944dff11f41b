"""Real processes: whatever is killed, stopped or restarted, the job ends with the same bits."""

import itertools
import os
import signal
from pathlib import Path

import pytest

from tests.manager.jobs import Job, together


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    """The weights that 80 steps without a failure give."""
    with Job(tmp_path_factory.mktemp("unfailed"), replicas_min=3) as job:
        shas = {group.finish() for group in job.start_all("r0", "r1", "r2")}
    (sha,) = shas
    return sha


def test_a_killed_group_comes_back_and_the_bits_are_the_same(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=2, step_time_s=0.05) as job:
        r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(r0, r1, r2)
        r1.wait("shard")
        r1.kill()
        again = job.start("r1")
        assert {r0.finish(), r2.finish(), again.finish()} == {unfailed}
        assert again.said("heal.finished")


def test_two_of_three_die_at_once_and_the_bits_are_the_same(tmp_path, unfailed):
    with Job(tmp_path, step_time_s=0.05) as job:
        groups = job.start_all("r0", "r1", "r2")
        together(*groups)
        for group in groups[:2]:
            group.kill()
        again = job.start_all("r0", "r1")
        assert {g.finish() for g in (groups[2], *again)} == {unfailed}


def test_one_group_alone_gives_the_same_bits(tmp_path, unfailed):
    with Job(tmp_path) as job:
        assert job.start("only").finish() == unfailed


def test_fast_mode_survives_too_and_all_groups_agree(tmp_path):
    with Job(tmp_path, replicas_min=2, mode="fast", step_time_s=0.05) as job:
        r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(r0, r1, r2)
        r1.wait("shard")
        r1.kill()
        again = job.start("r1")
        assert len({r0.finish(), r2.finish(), again.finish()}) == 1


def test_a_loop_as_it_was_with_a_wrapped_optimizer_survives(tmp_path):
    with Job(tmp_path, replicas_min=2, mode="elastic", step_time_s=0.05) as job:
        r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(r0, r1, r2)
        r1.kill()
        again = job.start("r1")
        assert len({r0.finish(), r2.finish(), again.finish()}) == 1
        assert again.said("heal.finished")


def test_a_stopped_trainer_is_given_up_and_heals_when_it_goes_on(tmp_path, unfailed):
    options = {"detect_within_s": 0.3}
    with Job(tmp_path, replicas_min=2, step_time_s=0.05, options=options) as job:
        r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(r0, r1, r2)
        r1.signal(signal.SIGSTOP)
        assert "is stopped" in r0.wait("step.aborted")["reason"]
        r0.wait("step.committed", members=("r0", "r2"))
        r1.signal(signal.SIGCONT)
        assert "lost a rank" in r1.wait("error")["what"]  # its manager had given it up
        assert {r0.finish(), r2.finish()} == {unfailed}


def test_a_lighthouse_that_is_killed_and_restarted_costs_no_step(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=2, step_time_s=0.05) as job:
        groups = job.start_all("r0", "r1", "r2")
        together(*groups)
        job.kill_lighthouse()
        for _ in range(20):
            groups[0].wait("step.committed")  # nobody is asked, so nobody waits
        job.restart_lighthouse()
        assert {group.finish() for group in groups} == {unfailed}
        assert not any(group.said("step.failed") for group in groups)


def test_a_death_while_the_lighthouse_is_away_waits_for_it_and_loses_nothing(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=2, step_time_s=0.05) as job:
        r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(r0, r1, r2)
        job.kill_lighthouse()
        r1.kill()
        r0.wait("step.failed")
        job.restart_lighthouse()
        r0.wait("step.committed", members=("r0", "r2"))
        again = job.start("r1")
        assert {r0.finish(), r2.finish(), again.finish()} == {unfailed}


def test_a_drained_group_leaves_and_nobody_repeats_a_step(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=2, step_time_s=0.02) as job:
        r0, r2 = job.start_all("r0", "r2")
        r1 = job.start("r1", drain_after=10)
        end = r1.wait("ended_loop")
        assert "preempted" in end["why"] and end["committed"] < 80
        assert {r0.finish(), r2.finish()} == {unfailed}
        assert not any(g.said("step.failed") for g in (r0, r1, r2))


def test_a_manager_that_is_killed_takes_its_trainer_out_and_the_others_go_on(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=2, step_time_s=0.05) as job:
        r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(r0, r1, r2)
        os.kill(manager_of(r1.process.pid), signal.SIGKILL)
        assert r1.wait("error")["kind"] == "ManagerLost"
        again = job.start("r1")
        assert {r0.finish(), r2.finish(), again.finish()} == {unfailed}


def test_a_manager_leaves_no_orphan_behind(tmp_path):
    with Job(tmp_path, step_time_s=0.05) as job:
        r0 = job.start("r0")
        r0.wait("shard", step=3)
        manager = manager_of(r0.process.pid)
        pidfd = os.pidfd_open(manager)
        r0.kill()
        import select

        assert select.select([pidfd], [], [], 20.0)[0], "the manager outlived its trainer"


def test_each_sample_is_taken_once_an_epoch_whoever_is_killed(tmp_path):
    """80 steps of 3 shards of 2 samples are 12 epochs of 40, each shard always with its own."""
    with Job(tmp_path, replicas_min=2, data=40, step_time_s=0.05) as job:
        r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(r0, r1, r2)
        r1.wait("shard")
        r1.kill()
        again = job.start("r1")
        assert len({r0.finish(), r2.finish(), again.finish()}) == 1
        taken = {}
        for said in itertools.chain(*(g.said("shard") for g in (r0, r1, r2, again))):
            place = said["step"], said["shard"]
            assert taken.setdefault(place, said["samples"]) == said["samples"]
        order = list(itertools.chain(*(taken[place] for place in sorted(taken))))
        assert sorted(taken) == [(step, shard) for step in range(80) for shard in range(3)]
        for epoch in range(0, 480, 40):
            assert sorted(order[epoch : epoch + 40]) == list(range(40))


def manager_of(pid: int) -> int:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == pid and "ftcore.daemon" in command:
            return int(path.parent.name)
    raise AssertionError(f"process {pid} has no manager")
