"""Real processes: two groups compute, a third follows; when one is killed it takes over at once."""

import signal

import pytest

from tests.manager.jobs import Job, together

TWO_AND_A_SPARE = ("--max-replicas", "2", "--spares", "1")


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    """The weights that 80 steps without a failure give."""
    with Job(tmp_path_factory.mktemp("unfailed")) as job:
        return job.start("r0").finish()


def shards_since(group, step):
    return [e for e in group.said("shard") if e["step"] >= step]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_spare_takes_over_from_a_killed_group_without_a_heal(tmp_path, mode, unfailed):
    job = Job(tmp_path, replicas_min=2, serve=TWO_AND_A_SPARE, step_time_s=0.05, mode=mode)
    with job:
        r0, r1 = job.start_all("r0", "r1")
        together(r0, r1)
        r2 = job.start("r2")
        together(r0, r1, r2)
        last = r2.wait("step.committed", members=("r0", "r1", "r2"))["step"]
        assert not r2.said("shard")  # it follows
        r0.kill()
        r2.wait("shard")  # and now it computes
        shas = {r1.finish(), r2.finish()}
        assert len(shas) == 1 and (mode == "fast" or shas == {unfailed})
        assert len(r2.said("heal.finished")) == 1  # when it came
        assert {e["step"] for e in shards_since(r2, 0)} <= set(range(last, 80))


def test_a_group_that_comes_back_follows_the_spare_that_took_over(tmp_path, unfailed):
    options = {"serve": TWO_AND_A_SPARE, "step_time_s": 0.1, "holds": (2, 60)}
    with Job(tmp_path, replicas_min=2, **options) as job:
        r0, r1 = job.start_all("r0", "r1")
        together(r0, r1)
        r2 = job.start("r2")
        together(r0, r1, r2)
        r1.signal(signal.SIGTERM)
        r1.wait("ended_loop")
        r2.wait("shard")
        again = job.start_again("r1")
        assert {r0.finish(), r2.finish(), again.finish()} == {unfailed}
        assert not any(group.said("step.failed") for group in (r0, r1, r2))
        assert not again.said("shard")
