"""Guards in the vote of real processes: what is wrong is named, refused everywhere and repaired."""

import json
import urllib.request

import pytest

from ftcore import Guards
from tests.manager.jobs import Job, together

NAMES = ("r0", "r1", "r2")
QUIET = {"straggler_factor": None}


def guarded(**guards):
    return {"options": {"guards": Guards(**{**QUIET, **guards})}}


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    """The weights that 80 steps give when nothing goes wrong and nothing is guarded."""
    with Job(tmp_path_factory.mktemp("unfailed")) as job:
        return job.start("only").finish()


def refusals(group):
    return [(e["step"], e["finding"], e["replica_ids"]) for e in group.said("guard.refused")]


def start(job, **wrong_of_r1):
    r0, r2 = job.start_all("r0", "r2")
    return r0, job.start("r1", **wrong_of_r1), r2


def test_a_flipped_bit_is_named_and_healed_before_it_reaches_any_weight(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=3, **guarded(digest_every_steps=1)) as job:
        groups = start(job, flip_after=[20])
        assert {group.finish() for group in groups} == {unfailed}
        for group in groups:
            assert refusals(group) == [(21, "digest_differs", ["r1"])]
            assert [(e["step"], e["healing"]) for e in group.said("group.built")][1:] == [
                (21, ["r1"])
            ]


@pytest.mark.parametrize("mode", ["fast", "elastic"])
def test_a_flipped_bit_is_healed_in_every_mode(tmp_path, mode):
    with Job(tmp_path, replicas_min=3, mode=mode, **guarded(digest_every_steps=1)) as job:
        groups = start(job, flip_after=[20])
        assert len({group.finish() for group in groups}) == 1
        assert all(refusals(group) == [(21, "digest_differs", ["r1"])] for group in groups)


def test_a_group_whose_bits_flip_again_is_stopped_and_its_next_life_heals(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=2, step_time_s=0.02, **guarded(digest_every_steps=1)) as job:
        r0, r1, r2 = start(job, flip_after=[20, 30])
        error = r1.wait("error")
        assert error["kind"] == "GroupStopped" and "r1 differ from the digest" in error["what"]
        assert "hardware" in error["remedy"]
        again = job.start("r1")
        assert {r0.finish(), again.finish(), r2.finish()} == {unfailed}
        assert again.said("heal.finished")


def test_two_groups_that_differ_stop_because_nobody_knows_who_is_right(tmp_path):
    with Job(tmp_path, replicas_min=2, **guarded(digest_every_steps=5)) as job:
        r0, r1 = job.start("r0", flip_after=[20]), job.start("r1")
        for group in (r0, r1):
            assert "no majority: r0 has" in group.wait("error")["what"]


def test_the_group_that_brings_nan_is_named_and_its_shard_computed_again(tmp_path, unfailed):
    with Job(tmp_path, replicas_min=3, **guarded()) as job:
        groups = start(job, wrong=(20, float("nan"), 1))
        assert {group.finish() for group in groups} == {unfailed}
        for group in groups:
            assert refusals(group) == [(20, "not_finite", ["r1"])]


def test_nan_that_stays_stops_all_groups_with_the_reason(tmp_path):
    config = guarded()
    config["options"]["failed_steps_max"] = 3
    with Job(tmp_path, replicas_min=2, **config) as job:
        r0, r1 = job.start("r0"), job.start("r1", wrong=(20, float("nan"), 99))
        for group in (r0, r1):
            assert "the last because: gradient norm is nan" in group.wait("error")["what"]


def test_a_spike_is_refused_by_a_group_that_healed_as_by_all_others(tmp_path, unfailed):
    config = guarded(norm_spike_factor=50, norm_warmup_steps=4)
    with Job(tmp_path, replicas_min=2, step_time_s=0.05, **config) as job:
        r0, r1, r2 = start(job, wrong=(70, 1e6, 1))
        together(r0, r1, r2)
        r2.kill()
        again = job.start("r2")
        assert {r0.finish(), r1.finish(), again.finish()} == {unfailed}
        for group in (r0, r1, again):
            assert refusals(group) == [(70, "norm_spike", [])]


def test_a_spike_that_is_real_goes_through_in_the_end(tmp_path):
    config = guarded(norm_spike_factor=50, norm_warmup_steps=4, norm_spikes_max=2)
    with Job(tmp_path, replicas_min=2, **config) as job:
        r0, r1 = job.start("r0"), job.start("r1", wrong=(70, 1e6, 99))
        assert r0.finish() == r1.finish()
        assert refusals(r0) == refusals(r1) == [(70, "norm_spike", [])] * 2


def status(job):
    with urllib.request.urlopen(f"http://{job.lighthouse.address}/status", timeout=10) as answer:
        return json.load(answer)["jobs"]["default"]


def test_a_slow_group_is_named_and_the_lighthouse_shows_how_slow_it_is(tmp_path):
    with Job(tmp_path, replicas_min=3, **guarded(straggler_factor=2.0)) as job:
        r0, _, _ = start(job, shard_time_s=0.1)
        assert r0.wait("guard.straggler")["replica_ids"] == ["r1"]
        for _ in range(20):
            r0.wait("step.committed")  # meanwhile its manager reports
        groups = status(job)["groups"]
        assert groups["r1"]["slowness"] > 2 > groups["r0"]["slowness"]


def test_a_slow_group_leaves_in_good_order_when_it_is_to_be_evicted(tmp_path, unfailed):
    config = guarded(straggler_factor=2.0, straggler_evict=True)
    with Job(tmp_path, replicas_min=2, **config) as job:
        r0, r1, r2 = start(job, shard_time_s=0.1)
        assert "r1 takes" in r1.wait("ended_loop")["why"]
        assert {r0.finish(), r2.finish()} == {unfailed}
        assert not any(group.said("step.failed") for group in (r0, r1, r2))


def test_groups_with_other_guards_are_refused(tmp_path):
    with Job(tmp_path, step_time_s=0.05, **guarded()) as job:
        first = job.start("r0")
        first.wait("step.committed")
        error = job.start("r1", **guarded(digest_every_steps=3)).wait("error")
        assert (
            error["what"].startswith("guards is Guards(")
            and "digest_every_steps=3" in error["what"]
        )
        first.finish()
