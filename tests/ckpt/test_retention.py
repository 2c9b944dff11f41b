"""Retention: rules combine, and the newest step is never deleted."""

import itertools
import random

import pytest

from ckpt.errors import CheckpointError
from ckpt.retention import Policy, StepFacts, plan_deletes


def steps(*numbers, **facts):
    return [StepFacts(step=n, created_unix_s=n, **facts) for n in numbers]


def test_the_last_ones_stay():
    assert plan_deletes(steps(1, 2, 3, 4), Policy(keep_last=2), now_unix_s=9) == [1, 2]


def test_a_step_is_kept_if_any_rule_keeps_it():
    policy = Policy(keep_last=1, keep_every=10)
    assert plan_deletes(steps(5, 10, 15, 20, 25), policy, now_unix_s=9) == [5, 15]


def test_the_best_stay_and_a_nan_is_never_best():
    found = [StepFacts(step=i, metrics={"loss": v}) for i, v in enumerate([3, 1, float("nan"), 2])]
    assert plan_deletes(found, Policy(keep_best=1), now_unix_s=0) == [0, 2]


def test_pinned_steps_stay():
    found = [*steps(1, pinned=True), *steps(2, 3)]
    assert plan_deletes(found, Policy(keep_last=1), now_unix_s=0) == [2]


def test_a_fresh_run_in_an_old_directory_keeps_its_only_step():
    found = steps(10, 1000)
    assert plan_deletes(found, Policy(keep_last=1), now_unix_s=0, just_committed=10) == []


def test_a_clock_that_runs_ahead_deletes_nothing_young():
    found = [StepFacts(step=1, created_unix_s=5000.0), StepFacts(step=2, created_unix_s=100.0)]
    assert plan_deletes(found, Policy(keep_younger_s=10), now_unix_s=100.0) == []


@pytest.mark.parametrize("seed", range(200))
def test_the_newest_step_is_never_deleted(seed):
    rng = random.Random(seed)
    found = steps(*rng.sample(range(100), rng.randint(1, 20)))
    rules = {
        "keep_last": rng.choice([None, 1, 3]),
        "keep_every": rng.choice([None, 7]),
        "keep_younger_s": rng.choice([None, 30.0]),
    }
    gone = plan_deletes(found, Policy(**rules), now_unix_s=rng.uniform(0, 1000))
    assert max(s.step for s in found) not in gone
    assert gone == sorted(set(gone)) and set(gone) <= {s.step for s in found}


@pytest.mark.parametrize("rule", ["keep_last", "keep_every", "keep_best", "keep_younger_s"])
def test_a_rule_that_keeps_nothing_is_refused(rule):
    with pytest.raises(CheckpointError, match=rule):
        Policy(**{rule: 0})


def test_every_combination_of_two_rules_keeps_what_each_keeps_alone():
    found = steps(*range(1, 30))
    rules = {"keep_last": 2, "keep_every": 5, "keep_younger_s": 3.0}
    for a, b in itertools.combinations(rules, 2):
        alone = [set(plan_deletes(found, Policy(**{r: rules[r]}), now_unix_s=30)) for r in (a, b)]
        both = plan_deletes(found, Policy(**{a: rules[a], b: rules[b]}), now_unix_s=30)
        assert set(both) == set.intersection(*alone)
