import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcore.local_sgd.fragments import split_evenly
from ftcore.local_sgd.outer_reduce import start_average
from ftcore.local_sgd.quantize import BLOCK, error_bound, pack, packed_bytes, unpack
from tests.reduce.members import each, fake_groups

kinds = pytest.mark.parametrize("kind", ["int8", "fp8"])


def rough(seed, numel):
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 4, (numel,), generator=g)
    return torch.randn(numel, generator=g) * 2.0**powers


@kinds
@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**31), blocks=st.integers(1, 5))
def test_no_number_is_off_by_more_than_the_bound(kind, seed, blocks):
    values = rough(seed, BLOCK * blocks)
    packed = pack(values, kind)
    assert packed.numel() == packed_bytes(values.numel())
    assert ((unpack(packed, kind) - values).abs() <= error_bound(values, kind)).all()


@kinds
def test_the_bound_is_tight_to_a_factor_of_two(kind):
    values = rough(7, BLOCK * 400)
    errors = (unpack(pack(values, kind), kind) - values).abs()
    assert (errors > error_bound(values, kind) / 2).any()


@kinds
def test_zeros_stay_zeros_and_a_whole_block_of_them_has_no_scale(kind):
    assert torch.equal(unpack(pack(torch.zeros(BLOCK), kind), kind), torch.zeros(BLOCK))


@kinds
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows_after_unpacking(kind, bad):
    values = torch.ones(BLOCK)
    values[3] = bad
    assert not unpack(pack(values, kind), kind).isfinite().all()


def averaged(tensors, givers, size, kind):
    def story(group):
        out = torch.empty_like(tensors[0])
        rank = group.rank()
        mine = tensors[givers.index(rank)] if rank in givers else None
        running = start_average(group, mine, givers=givers, out=out, quantize=kind)
        running.gather()
        running.gather()
        running.wait()
        return out

    return each(fake_groups(size), story)


def padded(values):
    return torch.cat([values, values.new_zeros(-values.numel() % BLOCK)])


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("size, givers", [(1, [0]), (2, [0, 1]), (3, [0, 2]), (5, [1, 2, 3])])
@pytest.mark.parametrize("numel", [1, 300, 2000])
def test_the_mean_is_within_two_packings_of_the_truth_and_equal_on_all(kind, size, givers, numel):
    tensors = [rough(i, numel) for i in range(len(givers))]
    truth = sum(t.double() for t in tensors) / len(givers)
    got = averaged(tensors, givers, size, kind)
    assert all(torch.equal(got[0], other) for other in got)
    bound = torch.full_like(truth, 1e-6) * truth.abs().max()
    if kind:
        first = sum(error_bound(padded(t), kind) for t in tensors)[:numel] / len(givers)
        second = error_bound(padded(truth.float().abs() + first), kind)[:numel]
        bound = bound + first + second
    assert ((got[0].double() - truth).abs() <= bound).all()


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30), st.data())
def test_fragments_cover_all_parameters_in_order_and_none_is_empty(sizes, data):
    parts = data.draw(st.integers(1, len(sizes)))
    runs = split_evenly(sizes, parts)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    assert len(runs) == parts and all(runs)
    largest = max(sum(sizes[i] for i in run) for run in runs)
    assert largest <= sum(sizes) / parts + 2 * max(sizes)
