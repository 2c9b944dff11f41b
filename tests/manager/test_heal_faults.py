"""Real processes in which something goes wrong while a group heals, or in the user's own code."""

import pytest

from tests.manager import jobs
from tests.manager.jobs import Job, together

GENTLE = {"replicas_min": 2, "step_time_s": 0.05}
INNOCENT = ("never", "")  # a trap that registers the same state and does nothing


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("unfailed")) as job:
        return job.start("only").finish()


def trapped_job(tmp_path, *, r0=INNOCENT, r1=INNOCENT, r2=INNOCENT):
    """Three groups that train together; then r2 is killed and the traps are armed. Returns the job,
    r0 and r1."""
    armed = jobs._PROCESSES.Event()
    job = Job(tmp_path, armed=armed, **GENTLE)
    groups = [job.start(f"r{i}", trap=trap) for i, trap in enumerate((r0, r1, r2))]
    together(*groups)
    groups[2].kill()
    groups[0].wait("step.committed", members=("r0", "r1"))
    armed.set()
    return job, *groups[:2]


@pytest.mark.parametrize("fault", ["die", "raise"])
def test_a_source_that_fails_in_a_heal_is_left_out_and_the_others_serve(tmp_path, unfailed, fault):
    job, r0, r1 = trapped_job(tmp_path, r0=("offered", fault))
    with job:
        joiner = job.start("r2", trap=INNOCENT)
        r0.wait("trapped")
        joiner.wait("step.committed", members=("r1", "r2"))
        again = job.start("r0", trap=INNOCENT)
        assert {r1.finish(), joiner.finish(), again.finish()} == {unfailed}


@pytest.mark.parametrize("fault", ["die", "raise"])
def test_a_target_that_fails_in_its_heal_costs_the_others_a_step(tmp_path, unfailed, fault):
    job, r0, r1 = trapped_job(tmp_path)
    with job:
        joiner = job.start("r2", trap=("received", fault))
        joiner.wait("trapped")
        r0.wait("step.failed")
        r0.wait("step.committed", members=("r0", "r1"))
        again = job.start("r2", trap=INNOCENT)
        assert {r0.finish(), r1.finish(), again.finish()} == {unfailed}


def test_a_source_that_dies_while_it_is_read_is_replaced_by_the_other(tmp_path):
    """100 MB, so that the kill comes in the middle of the transfer."""
    with Job(tmp_path, replicas_min=2, width=800_000, steps=12) as job:
        r0, r1 = job.start_all("r0", "r1")
        together(r0, r1)
        joiner = job.start("r2")
        joiner.wait("group.built")
        r0.kill()
        assert r1.finish() == joiner.finish()
        assert joiner.said("heal.finished")


def test_a_lighthouse_that_restarts_in_a_heal_costs_nothing(tmp_path, unfailed):
    gate = jobs._PROCESSES.Event()
    job, r0, r1 = trapped_job(tmp_path)
    with job:
        joiner = job.start("r2", trap=("received", "wait", gate))
        joiner.wait("trapped")
        job.kill_lighthouse()
        job.restart_lighthouse()
        gate.set()
        assert {r0.finish(), r1.finish(), joiner.finish()} == {unfailed}
        assert not joiner.said("step.failed")


def test_a_loop_that_raises_ends_its_own_group_only(tmp_path, unfailed):
    with Job(tmp_path, **GENTLE) as job:
        r0, r2 = job.start_all("r0", "r2")
        r1 = job.start("r1", raise_at=30)
        r1.wait("shard", step=30)
        r0.wait("step.committed", members=("r0", "r2"))
        again = job.start("r1")
        assert {r0.finish(), r2.finish(), again.finish()} == {unfailed}


def test_all_but_one_die_at_once_in_a_heal(tmp_path, unfailed):
    job, r0, r1 = trapped_job(tmp_path, r0=("offered", "die"))
    with job:
        joiner = job.start("r2", trap=("received", "die"))
        r0.wait("trapped")
        joiner.wait("trapped")  # from the one that is left
        again = [job.start(name, trap=INNOCENT) for name in ("r0", "r2")]
        assert {group.finish() for group in (r1, *again)} == {unfailed}
