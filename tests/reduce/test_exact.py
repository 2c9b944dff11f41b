import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcore.process_group import GroupAborted
from ftcore.reduce.errors import BadDeal
from ftcore.reduce.exact import Deal, reduce_exact, slice_sizes
from tests.reduce.members import each, fake_groups


def reduced(groups, shards, owner_of):
    """Every rank brings its shards; returns what each rank got."""

    def story(group):
        out = torch.full_like(shards[0], float("nan"))
        local = {k: shards[k] for k, owner in enumerate(owner_of) if owner == group.rank()}
        reduce_exact(group, local, owner_of=owner_of, out=out)
        return out

    return each(groups, story)


def in_order(shards):
    """The stupid twin: one process, one loop, the element type of the sum stated."""
    wide = torch.float32 if shards[0].dtype in (torch.float16, torch.bfloat16) else shards[0].dtype
    total = shards[0].to(wide)
    for shard in shards[1:]:
        total = total + shard.to(wide)
    return total.to(shards[0].dtype)


def rough(seed, count, numel, dtype):
    """Numbers of very different size, so that every change of order shows."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(-8, 9, (count, numel), generator=g).double()
    return list((torch.randn(count, numel, generator=g).double() * 2**powers).to(dtype))


def bits(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


def test_shards_are_added_in_shard_order_whoever_has_them():
    shards = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    for owner_of in [(0, 1, 0), (1, 0, 1), (1, 1, 1), (0, 0, 0)]:
        got = reduced(fake_groups(2), shards, owner_of)
        assert [g.item() for g in got] == [0.0, 0.0]  # (1e8 + 1) - 1e8 in float32


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@settings(deadline=None, max_examples=300)
@given(
    size=st.integers(1, 6),
    count=st.integers(1, 8),
    numel=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_every_deal_gives_the_bits_of_one_process(size, count, numel, dtype, seed):
    shards = rough(seed, count, numel, dtype)
    rng = random.Random(seed)
    owner_of = [rng.randrange(size) for _ in range(count)]
    expected = bits(in_order(shards))
    assert {bits(out) for out in reduced(fake_groups(size), shards, owner_of)} == {expected}


def test_a_rank_without_shards_gets_the_sum_too():
    shards = rough(1, 2, 5, torch.float32)
    got = reduced(fake_groups(3), shards, (0, 2))
    assert torch.equal(got[1], in_order(shards))


def test_one_rank_alone_adds_in_the_same_order():
    shards = rough(2, 7, 1000, torch.float32)
    assert torch.equal(reduced(fake_groups(1), shards, [0] * 7)[0], in_order(shards))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_longer_than_one_piece_are_added_alike(dtype):
    shards = rough(4, 3, 300_001, dtype)
    got = reduced(fake_groups(2), shards, (0, 1, 1))
    assert {bits(out) for out in got} == {bits(in_order(shards))}


def test_the_shards_stay_as_they_were_for_a_repeated_step():
    shards = rough(3, 3, 10, torch.float32)
    before = [bits(s) for s in shards]
    reduced(fake_groups(2), shards, (0, 1, 1))
    assert [bits(s) for s in shards] == before


def test_a_group_that_breaks_raises_a_retryable_error():
    groups = fake_groups(2)
    groups[0].abort("member lost")
    with pytest.raises(GroupAborted) as caught:
        reduce_exact(groups[0], {0: torch.ones(3)}, owner_of=(0, 1), out=torch.empty(3))
    assert caught.value.retryable


@pytest.mark.parametrize("numel, parts", [(0, 3), (2, 3), (3, 3), (10, 3), (7, 1)])
def test_slices_cover_everything_and_differ_by_at_most_one(numel, parts):
    sizes = slice_sizes(numel, parts)
    assert sum(sizes) == numel and len(sizes) == parts and max(sizes) - min(sizes) <= 1


def test_a_shard_that_nobody_dealt_is_refused():
    with pytest.raises(BadDeal, match=r"dealt shards \[0\], but brings shards \[1\]"):
        reduce_exact(fake_groups(1)[0], {1: torch.ones(2)}, owner_of=(0,), out=torch.empty(2))


def test_an_owner_outside_the_world_is_refused():
    with pytest.raises(BadDeal, match="0 to 1"):
        Deal(owner_of=(0, 2), rank=0, world_size=2)


def test_shards_of_another_size_are_refused():
    with pytest.raises(BadDeal, match="must be flat and alike"):
        reduce_exact(fake_groups(1)[0], {0: torch.ones(3)}, owner_of=(0,), out=torch.empty(2))
