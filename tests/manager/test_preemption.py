"""Real processes: a group that has notice leaves in good order, and nobody repeats a step."""

import signal

import pytest

from tests.manager.jobs import Job, together


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    """The weights that 80 steps without a failure give."""
    with Job(tmp_path_factory.mktemp("unfailed")) as job:
        return job.start("r0").finish()


def nobody_repeated(groups):
    return not any(group.said("step.failed") for group in groups)


def test_sigterm_lets_a_group_leave_and_nobody_repeats_a_step(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=2, step_time_s=0.02) as job:
        groups = r0, r1, r2 = job.start_all("r0", "r1", "r2")
        together(*groups)
        r1.signal(signal.SIGTERM)
        assert r1.wait("noticed")["why"] == "SIGTERM"
        assert r1.wait("ended_loop")["why"] == "drained: SIGTERM"
        assert {r0.finish(), r2.finish()} == {unfailed}
        r1.wait("finished")  # nothing cut it short
        assert nobody_repeated(groups)


def test_a_file_lets_a_group_leave_and_nobody_repeats_a_step(tmp_path, unfailed):
    going = tmp_path / "going"
    with Job(tmp_path, step_time_s=0.02) as job:
        r0 = job.start("r0")
        r1 = job.start("r1", options={"preemption": {"file": str(going), "poll_s": 0.05}})
        together(r0, r1)
        going.write_text("rack 7 goes down")
        assert r1.wait("ended_loop")["why"] == "drained: rack 7 goes down"
        assert r0.finish() == unfailed
        assert nobody_repeated((r0, r1))


def test_all_groups_have_notice_at_once_and_all_leave_in_good_order(tmp_path):
    with Job(tmp_path, steps=100_000, step_time_s=0.02) as job:
        groups = job.start_all("r0", "r1", "r2")
        together(*groups)
        for group in groups:
            group.signal(signal.SIGTERM)
        ends = {group.wait("ended_loop")["committed"] for group in groups}
        assert len(ends) == 1 and nobody_repeated(groups)


def test_a_group_that_still_waits_for_a_quorum_leaves_at_once(tmp_path):
    with Job(tmp_path, replicas_min=2) as job:
        r0 = job.start("r0")
        r0.wait("manager.attached")
        r0.signal(signal.SIGTERM)
        assert r0.wait("ended_loop") | {"at": 0} == {
            "event": "ended_loop",
            "at": 0,
            "committed": 0,
            "why": "drained: SIGTERM",
        }


def test_groups_come_and_go_and_the_bits_are_the_same(tmp_path, unfailed):
    """One group, then three, then one."""
    with Job(tmp_path, step_time_s=0.05) as job:
        r0 = job.start("r0")
        r0.wait("step.committed")
        r1, r2 = job.start_all("r1", "r2")
        together(r0, r1, r2)
        for group in (r0, r1):
            group.signal(signal.SIGTERM)
            group.wait("ended_loop")
        r2.wait("step.committed", members=("r2",))
        assert r2.finish() == unfailed
        assert nobody_repeated((r0, r1, r2))
