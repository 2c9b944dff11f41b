"""One bad thing at a time, at its worst moment, in many worlds that are well otherwise."""

from dataclasses import replace

import pytest

from ftcore.wire.messages import Want
from tests.sim.world import World

SEEDS = range(40)


class Story(World):
    """A world of healthy groups in which only the test breaks things."""

    linger_s = 0.5

    def __init__(self, seed, *, groups=3, policy=None, **options):
        super().__init__(seed, groups=groups, **options)
        self.has_journal, self.loss = True, 0.0
        self.policy = replace(self.policy, **(policy or {}))
        self.leader.core.policy = self.policy
        self.until(lambda: self.trains_with(self.names))

    def chaos(self):
        """Nothing by itself."""

    def was_refused(self, group, what):
        self.refused_because = what
        self.die(group, says_so=True)

    def until(self, condition, *, limit_s=60.0):
        deadline = self.now + limit_s
        while not condition():
            assert self.now < deadline, "it never came to that"
            self.run(self.now + 0.003)

    def trains_with(self, names):
        standing = self.leader.core.standing
        if standing is None or standing.replica_ids != tuple(names):
            return False
        return all(self.groups[n].state.committed > standing.from_step for n in names)

    def is_healing(self, name):
        running = self.groups[name].running
        return running is not None and running.must_heal

    def restart(self, *names):
        for name in names:
            self.die(self.groups[name], says_so=True)
            self.at(0.3, self.start_group, name)

    def restart_until_it_heals(self, name):
        self.restart(name)
        self.until(lambda: not self.groups[name].is_up)
        self.until(lambda: self.groups[name].is_up and self.is_healing(name))

    def ends_well(self):
        self.run(self.now + 1.0)  # no process comes back before its death is known
        self.calm()
        self.run(self.now + 20.0)
        self.check_calm()


def stories(test):
    return pytest.mark.parametrize("seed", SEEDS)(test)


@stories
def test_a_source_dies_in_a_heal(seed):
    w = Story(seed)
    w.restart_until_it_heals("r2")
    w.restart("r0")
    w.ends_well()


@stories
def test_the_target_dies_in_its_heal(seed):
    w = Story(seed)
    w.restart_until_it_heals("r2")
    w.restart("r2")
    w.ends_well()


@stories
def test_all_sources_but_one_die_in_a_heal(seed):
    w = Story(seed, groups=4)
    w.restart_until_it_heals("r3")
    w.restart("r0", "r1")
    w.ends_well()


@stories
def test_two_die_at_once(seed):
    w = Story(seed, groups=5)
    w.restart("r1", "r3")
    w.ends_well()


@stories
def test_all_but_one_die_and_nothing_is_taken_back(seed):
    w = Story(seed, groups=4)
    committed = w.groups["r0"].state.committed
    w.restart("r1", "r2", "r3")
    w.ends_well()
    assert w.groups["r1"].state.committed > committed


@stories
def test_all_groups_leave_at_nearly_the_same_time_and_each_gets_out(seed):
    """The first is still needed for the steps before its boundary when the last ones leave."""
    w = Story(seed)
    for name in w.names:
        group = w.groups[name]
        group.core.leave("preempted")
        w.say_news(group)
        w.run(w.now + 0.002 * (seed % 10))
    w.until(lambda: all(w.groups[n].core.want is Want.GONE for n in w.names))


@stories
def test_the_lighthouse_restarts_in_a_heal(seed):
    w = Story(seed)
    w.restart_until_it_heals("r2")
    w.stop_server(w.leader)
    w.at(0.5, w.start_server)
    w.ends_well()


@stories
def test_a_group_whose_shapes_differ_is_refused_and_costs_nobody_a_step(seed):
    w = Story(seed)
    w.settings_of["stranger"] = {"state layout": "another"}
    w.start_group("stranger")
    w.until(lambda: not w.groups["stranger"].is_up)
    assert "state layout is another here" in w.refused_because
    assert not any(w.groups[name].failures for name in w.names)
    del w.groups["stranger"]
    w.ends_well()


@stories
def test_a_callback_raises_on_one_group_whose_process_ends(seed):
    """It says which step failed, and is gone: the others repeat that step without it."""
    w = Story(seed)
    w.until(lambda: w.groups["r1"].running is not None)
    w.end_step(w.groups["r1"], w.groups["r1"].token, "ValueError in the training loop")
    w.restart("r1")
    w.ends_well()


@stories
def test_guards_refuse_steps_and_name_one(seed):
    w = Story(seed, has_guards=True)
    w.until(lambda: w.counts["refusals"] >= 3)
    w.ends_well()


@stories
def test_the_one_that_a_guard_named_dies_before_it_heals(seed):
    w = Story(seed, has_guards=True)
    w.until(lambda: any(not g.core.is_valid for g in w.groups.values()))
    w.restart(*(name for name, g in w.groups.items() if not g.core.is_valid))
    w.ends_well()


class WithSpare(Story):
    """Two groups compute, the third follows; who is which depends on who came first."""

    def __init__(self, seed):
        policy = {"replicas_min": 1, "replicas_max": 2, "spares_max": 9}
        super().__init__(seed, policy=policy)
        (self.spare,) = self.leader.core.standing.spares
        self.active = [name for name in self.names if name != self.spare]

    def spares(self):
        return self.leader.core.standing.spares


@stories
def test_an_active_group_dies_a_spare_takes_over_and_who_comes_back_follows(seed):
    w = WithSpare(seed)
    lost, other = w.active
    w.die(w.groups[lost], says_so=True)
    w.until(lambda: w.trains_with(sorted([other, w.spare])))
    assert not w.spares()
    w.at(0.1, w.start_group, lost)
    w.ends_well()
    assert w.spares() == {lost}


@stories
def test_a_spare_dies_and_nobody_changes_its_part(seed):
    w = WithSpare(seed)
    w.restart(w.spare)
    w.ends_well()
    assert w.spares() == {w.spare}


@stories
def test_both_active_groups_die_at_once_and_the_spare_goes_on(seed):
    w = WithSpare(seed)
    committed = w.groups[w.spare].state.committed
    w.restart(*w.active)
    w.ends_well()
    assert w.groups[w.active[0]].state.committed > committed
    assert w.spare not in w.spares()


@stories
def test_an_active_group_drains_and_a_spare_takes_over_with_no_step_repeated(seed):
    w = WithSpare(seed)
    leaves, other = w.active
    w.groups[leaves].core.leave("preempted")
    w.say_news(w.groups[leaves])
    w.until(lambda: w.trains_with(sorted([other, w.spare])))
    assert not w.spares()
    assert not any(w.groups[name].failures for name in w.names)
    w.at(0.1, w.start_group, leaves)
    w.ends_well()
