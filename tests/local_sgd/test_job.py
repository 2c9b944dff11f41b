"""Real processes under a real manager: deaths, joins and restarts in mid-interval."""

import threading
from collections import defaultdict

import pytest

from ftcore import Guards
from tests.local_sgd.trainer import main
from tests.manager import jobs

PLAIN = {"sync_every": 4}
STREAMING = {"sync_every": 8, "fragments": 2, "delay": 2, "quantize": "int8"}
variants = pytest.mark.parametrize("outer", [PLAIN, STREAMING], ids=["diloco", "streaming int8"])


class Group(jobs.Group):
    def __init__(self, name, config):
        self.name, self.events = name, []
        self._inbox = jobs.queue.SimpleQueue()
        here, there = jobs._PROCESSES.Pipe(duplex=False)
        gates = config.pop("gates")
        arguments = (there, {**config, "replica_id": name}, gates)
        self.process = jobs._PROCESSES.Process(target=main, args=arguments)
        self.process.start()
        there.close()
        threading.Thread(target=self._read, args=(here,), daemon=True).start()


class Job(jobs.Job):
    def __init__(self, folder, **config):
        super().__init__(folder, **config)
        self.gates = {name: jobs._PROCESSES.Event() for name in ("go on", "leave")}

    def start_joiner(self, name):
        """Start a group, and let the others go on when it has come."""
        joiner = self.start(name)
        joiner.wait("manager.attached")
        self.gates["go on"].set()
        return joiner

    def start(self, name, **config):
        self.groups.append(Group(name, {**self.config, "gates": self.gates, **config}))
        return self.groups[-1]


@pytest.fixture
def job(tmp_path):
    def make(outer, **config):
        config = {"steps": 24, "hold_at": 12, "inner_time_s": 0.02, "outer": outer, **config}
        made.append(Job(tmp_path, replicas_min=2, **config))
        return made[-1].__enter__()

    made = []
    yield make
    for each in made:
        for gate in each.gates.values():
            gate.set()
        each.__exit__()


def assert_equal_after_every_outer_step(*groups):
    """Whoever tells of an outer step has the same outer parameters as all others that do."""
    told = defaultdict(set)
    for group in groups:
        for said in group.said("outer"):
            told[said["step"]].add(tuple(said["shas"]))
    assert told and all(len(shas) == 1 for shas in told.values())


@variants
def test_groups_that_die_in_mid_interval_come_back_equal(job, outer):
    j = job(outer)
    r0, r1, r2 = j.start_all("r0", "r1", "r2")
    for group in (r0, r1, r2):
        group.wait("outer", members=("r0", "r1", "r2"))
    r1.wait("inner")
    r1.wait("inner")
    r1.kill()
    r0.wait("outer", members=("r0", "r2"))
    again = j.start_joiner("r1")
    assert len({r0.finish(), r2.finish(), again.finish()}) == 1
    assert again.said("heal.finished")
    assert_equal_after_every_outer_step(r0, r1, r2, again)


@variants
def test_the_survivors_of_a_death_repeat_no_inner_step(job, outer):
    j = job(outer)
    r0, r1, r2 = j.start_all("r0", "r1", "r2")
    for group in (r0, r1, r2):
        group.wait("outer", members=("r0", "r1", "r2"))
    r2.wait("inner")
    r2.kill()
    j.gates["go on"].set()
    assert r0.finish() == r1.finish()
    for group in (r0, r1):
        inner = [said["step"] for said in group.said("inner")]
        assert len(inner) == len(set(inner))


def test_a_joiner_that_comes_late_is_equal_after_its_first_outer_step(job):
    j = job(PLAIN)
    r0, r1 = j.start_all("r0", "r1")
    r0.wait("outer", members=("r0", "r1"))
    late = j.start_joiner("r9")
    assert len({r0.finish(), r1.finish(), late.finish()}) == 1
    assert_equal_after_every_outer_step(r0, r1, late)


def test_training_under_the_manager_goes_down(job):
    j = job({"sync_every": 5}, steps=60, inner_time_s=0.0)
    j.gates["go on"].set()
    r0, r1 = j.start_all("r0", "r1")
    assert r0.finish() == r1.finish()
    losses = [said["loss"] for said in r0.said("outer")]
    assert sum(losses[-10:]) < sum(losses[:10]) / 2, losses


@variants
def test_a_bit_that_flips_in_the_outer_parameters_is_named_and_healed(job, outer):
    j = job(outer, guards=Guards(digest_every_steps=1, straggler_factor=None))
    j.gates["go on"].set()
    groups = [*j.start_all("r0", "r2"), j.start("r1", flip_after=5)]
    assert len({group.finish() for group in groups}) == 1
    for group in groups:
        (refused,) = group.said("guard.refused")
        assert (refused["step"], refused["replica_ids"]) == (6, ["r1"])
