import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcore.data import Permutation, seed_for


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4097])
def test_every_sample_comes_exactly_once(size):
    assert sorted(Permutation(3, 0, size)) == list(range(size))


@settings(max_examples=50)
@given(st.integers(1, 10**15), st.integers(0, 2**64), st.integers(0, 1000), st.data())
def test_any_place_of_any_size_is_computed_alone_and_can_be_inverted(size, seed, epoch, data):
    permutation = Permutation(seed, epoch, size)
    index = data.draw(st.integers(0, size - 1))
    assert 0 <= permutation[index] < size
    assert permutation.index_of(permutation[index]) == index


def test_the_order_is_the_same_on_every_machine_and_version():
    assert [Permutation(1, 0, 1000)[i] for i in range(5)] == GOLDEN


GOLDEN = [667, 165, 155, 718, 725]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(Permutation(seed, epoch, 30)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_each_sample_is_as_likely_at_each_place():
    """Chi-square of place against sample over 4,000 seeds: 81 degrees of freedom, p = 1e-6."""
    size, seeds = 10, 4000
    counts = Counter(
        (i, s) for seed in range(seeds) for i, s in enumerate(Permutation(seed, 0, size))
    )
    expected = seeds / size
    chi_square = sum(
        (counts[i, s] - expected) ** 2 / expected for i in range(size) for s in range(size)
    )
    assert chi_square < 160


def test_neighbours_are_scattered():
    order = list(Permutation(0, 0, 10_000))
    steps = Counter(b - a for a, b in itertools.pairwise(order))
    assert steps.most_common(1)[0][1] < 12


@pytest.mark.parametrize("index", [-1, 10])
def test_a_place_outside_is_refused(index):
    with pytest.raises(IndexError):
        Permutation(0, 0, 10)[index]
    with pytest.raises(IndexError):
        Permutation(0, 0, 10).index_of(index)


def test_an_empty_data_set_has_no_order():
    with pytest.raises(ValueError, match="0 samples"):
        Permutation(0, 0, 0)


def test_seeds_differ_by_seed_step_and_shard_and_are_fixed():
    seeds = {seed_for(s, t, k) for s in range(5) for t in range(50) for k in range(8)}
    assert len(seeds) == 5 * 50 * 8
    assert max(seeds) < 2**63
    assert seed_for(1, 2, 3) == SEED


SEED = 2672902235790102262
