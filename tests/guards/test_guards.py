import itertools
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcore.guards import (
    Finding,
    GuardPolicy,
    NormHistory,
    check_digests,
    check_finite,
    check_norm,
    check_stragglers,
    digest_is_due,
    straggler_scores,
)

POLICY = GuardPolicy(norm_spike_factor=10, norm_warmup_steps=4, norm_window_steps=8)


def after(*norms, policy=POLICY):
    history = NormHistory()
    for norm in norms:
        history = history.committed(norm, policy)
    return history


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_loss_that_is_not_finite_is_named(bad):
    found = check_finite({"loss": bad, "gradient norm": 1.0})
    assert found.finding is Finding.NOT_FINITE and found.why == f"loss is {bad}"


def test_finite_numbers_pass_however_large():
    assert check_finite({"loss": 1e300}) is None


def test_a_norm_spike_is_refused_and_its_size_said():
    found = check_norm(50.0, after(1, 2, 2, 3), POLICY)
    assert found.finding is Finding.NORM_SPIKE
    assert "norm 50 is 25 times the median 2 of 4 steps" in found.why


def test_no_spike_before_the_warm_up_ends():
    assert check_norm(1e9, after(1, 1, 1), POLICY) is None


def test_the_window_forgets_old_norms():
    assert check_norm(50.0, after(*[1] * 8, *[20] * 8), POLICY) is None


def test_a_spike_that_comes_back_on_the_same_samples_is_let_through_in_the_end():
    history = after(1, 1, 1, 1)
    for _ in range(POLICY.norm_spikes_max):
        assert check_norm(50.0, history, POLICY)
        history = history.refused()
    assert check_norm(50.0, history, POLICY) is None
    assert history.committed(50.0, POLICY).spikes_in_a_row == 0


def test_guards_that_are_off_never_object():
    off = GuardPolicy(straggler_factor=None)
    assert check_norm(1e9, after(*[1] * 20), off) is None
    assert not digest_is_due(0, off)
    assert check_stragglers({"a": [9.0] * 99, "b": [1.0] * 99}, off) is None


def test_a_digest_is_due_every_so_many_steps():
    policy = GuardPolicy(digest_every_steps=5)
    assert [s for s in range(12) if digest_is_due(s, policy)] == [0, 5, 10]


def test_the_odd_one_out_is_named():
    found = check_digests({"a": "x", "b": "y", "c": "x"})
    assert (found.finding, found.replica_ids) == (Finding.DIGEST_DIFFERS, ("b",))


def test_two_groups_that_differ_accuse_nobody():
    found = check_digests({"a": "x", "b": "y"})
    assert (found.finding, found.replica_ids) == (Finding.DIGEST_TIE, ())


def test_every_vote_of_up_to_five_groups():
    """No sampling: whoever is named is in a minority, and a majority is never named."""
    for size in range(1, 6):
        for votes in itertools.product("xyz", repeat=size):
            found = check_digests({f"r{i}": v for i, v in enumerate(votes)})
            if len(set(votes)) == 1:
                assert found is None
                continue
            most = max(votes.count(v) for v in "xyz")
            named = [votes[int(r[1:])] for r in found.replica_ids]
            if 2 * most > size:
                assert found.finding is Finding.DIGEST_DIFFERS
                assert len(named) == size - most and all(votes.count(v) < most for v in named)
            else:
                assert found.finding is Finding.DIGEST_TIE and not named


def test_a_slow_group_is_named_after_a_whole_window():
    times = {"a": [1.0] * 16, "b": [1.1] * 16, "c": [3.0] * 16}
    assert check_stragglers(times, POLICY).replica_ids == ("c",)
    assert check_stragglers({**times, "c": [3.0] * 15}, POLICY) is None


def test_one_slow_step_makes_no_straggler():
    times = {"a": [1.0] * 16, "b": [1.0] * 15 + [60.0]}
    assert check_stragglers(times, POLICY) is None


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=2),
        st.lists(st.floats(0.001, 100), min_size=1, max_size=9),
        max_size=6,
    )
)
def test_scores_do_not_depend_on_order_or_unit(busy_s):
    scores = straggler_scores(busy_s)
    reverse = {r: [1000 * t for t in times] for r, times in reversed(busy_s.items())}
    assert straggler_scores(reverse) == pytest.approx(scores)
