import itertools
import random
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcore.base.errors import BadSetting
from ftcore.guards import (
    NO_GUARDS,
    Finding,
    Guards,
    NormHistory,
    Seen,
    Word,
    check_digests,
    check_finite,
    check_norm,
    check_stragglers,
    digest_is_due,
    judge,
    must_ask,
    straggler_scores,
)

POLICY = Guards(norm_spike_factor=10, norm_warmup_steps=4, norm_window_steps=8)


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
    assert check_norm(1e9, after(*[1] * 20), NO_GUARDS) is None
    assert not digest_is_due(0, NO_GUARDS)
    assert check_stragglers({"a": 9.0, "b": 1.0}, NO_GUARDS) is None
    seen = Seen(step=16, loss=nan, norm=inf)
    assert not must_ask(seen, NormHistory(), NO_GUARDS)
    assert judge(seen, {}, NormHistory(), NO_GUARDS).refusal is None


def test_a_digest_is_due_every_so_many_steps():
    policy = Guards(digest_every_steps=5)
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


def test_a_slow_group_is_named_with_its_factor():
    found = check_stragglers({"a": 1.0, "b": 1.1, "c": 3.0}, POLICY)
    assert found.replica_ids == ("c",)
    assert "c takes 2.86 times the usual time of a shard, more than 2" in found.why


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=2),
        st.floats(0.001, 100),
        max_size=6,
    )
)
def test_scores_do_not_depend_on_order_or_unit(busy_s):
    scores = straggler_scores(busy_s)
    reverse = {r: 1000 * t for r, t in reversed(busy_s.items())}
    assert straggler_scores(reverse) == pytest.approx(scores)


# All together: every member judges alike, and only what it knows for itself may differ


def seen(norm=1.0, *, step=3, loss=0.5):
    return Seen(step=step, loss=loss, norm=norm)


def test_who_brought_the_nan_is_named():
    words = {"a": Word(), "b": Word(is_finite=False), "c": Word()}
    found = judge(seen(nan), words, NormHistory(), POLICY).refusal
    assert found.replica_ids == ("b",)
    assert found.why == "gradient norm is nan, brought by b"


def test_a_calm_step_asks_nobody():
    assert not must_ask(seen(), after(1, 1, 1, 1), POLICY)


def test_the_highest_count_of_refusals_holds_for_all():
    """A member whose own reduction failed while others refused joins in at their count."""
    words = {"a": Word(refusals=2), "b": Word(refusals=0)}
    judged = judge(seen(99.0), words, after(1, 1, 1, 1), POLICY)
    assert judged.refusal and judged.history.spikes_in_a_row == 3
    words["a"] = Word(refusals=3)
    assert judge(seen(99.0), words, after(1, 1, 1, 1), POLICY).refusal is None


def test_a_group_of_several_stragglers_and_the_slowness_of_each():
    words = {"a": Word(busy_s=1.0), "b": Word(busy_s=4.0), "c": Word(busy_s=1.0), "d": Word()}
    judged = judge(seen(step=16), words, NormHistory(), POLICY)
    assert judged.refusal is None and judged.straggler.replica_ids == ("b",)
    assert judged.slowness == {"a": 0.4, "b": 4.0, "c": 0.4}


class Rank:
    """A member that keeps its own history and, now and then, sees its reduction fail."""

    def __init__(self):
        self.history = NormHistory()

    def word(self, rng):
        digest = rng.choice("xxxy")
        return Word(refusals=self.history.spikes_in_a_row, digest=digest, busy_s=rng.random())


@settings(deadline=None)
@given(seed=st.integers(0, 10**9))
def test_members_that_judge_always_judge_alike(seed):
    """Whatever norms come and whoever misses which attempt: those that finish an attempt agree
    whether to ask and what to say, and those that commit a step agree on the history."""
    rng = random.Random(seed)
    ranks = {name: Rank() for name in "abc"[: rng.randint(1, 3)]}
    guards = Guards(
        norm_spike_factor=3, norm_warmup_steps=2, norm_window_steps=5, digest_every_steps=4
    )
    for step in range(40):
        for _ in range(9):
            attempt = seen(rng.choice([1.0, 1.5, 9.0, nan]), step=step)
            finishing = {n: r for n, r in ranks.items() if rng.random() < 0.8}
            asks = {must_ask(attempt, r.history, guards) for r in ranks.values()}
            assert len(asks) == 1
            words = {}
            if asks == {True}:
                words = {name: rank.word(rng) for name, rank in ranks.items()}
                if len(finishing) < len(ranks) and rng.random() < 0.5:
                    continue  # one did not come to the exchange, so it failed for all
            judged = {n: judge(attempt, words, r.history, guards) for n, r in finishing.items()}
            assert len({j.refusal for j in judged.values()}) <= 1
            for name, judgement in judged.items():
                ranks[name].history = judgement.history
            if len(judged) == len(ranks) and not any(j.refusal for j in judged.values()):
                break
        for rank in ranks.values():
            rank.history = rank.history.committed(attempt.norm, guards)
        assert len({r.history for r in ranks.values()}) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"norm_spike_factor": 1.0},
        {"straggler_factor": 0.5},
        {"digest_every_steps": 0},
        {"straggler_window_steps": 0},
        {"norm_window_steps": 4, "norm_warmup_steps": 8},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(options):
    with pytest.raises(BadSetting, match=next(iter(options))):
        Guards(**options)
