"""One bad thing at a time, at its worst moment, in many worlds that are well otherwise."""

import pytest

from tests.sim.world import World

SEEDS = range(40)


class Story(World):
    """A world of healthy groups in which only the test breaks things."""

    def __init__(self, seed, *, groups=3, **options):
        super().__init__(seed, groups=groups, **options)
        self.has_journal, self.loss = True, 0.0
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
