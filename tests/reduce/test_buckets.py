import logging

import pytest
import torch
from torch import nn

from ftcore.process_group.errors import CollectiveFailed, GroupAborted
from ftcore.process_group.fake import FakeNetwork
from ftcore.reduce.buckets import Buckets
from ftcore.reduce.errors import BadDeal, GradientAfterLaunch, SparseGradient
from tests.reduce.members import each, fake_groups, join

SMALL = 300  # bytes a bucket: several buckets for the little model


def model():
    """The same on every thread, so no global seed."""
    m, generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.Generator()
    with torch.no_grad():
        for p in m.parameters():
            p.normal_(generator=generator.manual_seed(p.numel()))
    return m


def batch(shard):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(shard))


def loss(m, x):
    return m(x).pow(2).mean()


def gradients(m):
    return torch.cat([p.grad.flatten() for p in m.parameters()])


def mean_gradient(shards):
    """The stupid twin: one process, gradients added in shard order, then scaled."""
    total = None
    for shard in shards:
        m = model()
        loss(m, batch(shard)).backward()
        total = gradients(m) if total is None else total + gradients(m)
    return total * (1 / len(shards))


def test_the_plan_has_several_buckets():
    assert len(Buckets(model(), bucket_bytes_max=SMALL)) == 3


@pytest.mark.parametrize("armed", [False, True])
def test_fast_gives_every_rank_the_weighted_mean(armed):
    weights = [0.5, 0.25, 0.25]

    def story(group):
        m, weight = model(), weights[group.rank()]
        buckets = Buckets(m, bucket_bytes_max=SMALL)
        if armed:
            buckets.arm(group, weight=weight)
        loss(m, batch(group.rank())).backward()
        buckets.reduce_fast(group, weight=weight)
        return gradients(m)

    expected = sum(w * mean_gradient([r]) for r, w in enumerate(weights))
    for got in each(fake_groups(3), story):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_accumulation_over_several_backwards_and_steps(armed, set_to_none):
    def story(group):
        m = model()
        buckets = Buckets(m, bucket_bytes_max=SMALL)
        for _ in range(3):
            m.zero_grad(set_to_none=set_to_none)
            for shard in (0, 1):
                if armed and shard == 1:
                    buckets.arm(group, weight=0.5)
                (loss(m, batch(2 * group.rank() + shard)) / 2).backward()
            buckets.reduce_fast(group, weight=0.5)
        return gradients(m)

    for got in each(fake_groups(2), story):
        torch.testing.assert_close(got, mean_gradient(range(4)))


def test_a_pipeline_is_armed_for_all_its_backwards():
    def story(group):
        m = model()
        buckets = Buckets(m, bucket_bytes_max=SMALL)
        buckets.arm(group, weight=0.5, backwards=2)
        for shard in (0, 1):
            (loss(m, batch(shard)) / 2).backward()
        buckets.reduce_fast(group, weight=0.5)
        return gradients(m)

    for got in each(fake_groups(2), story):
        torch.testing.assert_close(got, mean_gradient([0, 1]))


def test_one_backward_too_many_is_refused():
    m = model()
    buckets = Buckets(m)
    buckets.arm(fake_groups(1)[0], weight=1.0)
    loss(m, batch(0)).backward()
    with pytest.raises(GradientAfterLaunch, match=r"2\.bias"):
        loss(m, batch(0)).backward()


def test_scaling_gradients_after_they_were_sent_is_refused():
    m = model()
    buckets = Buckets(m)
    buckets.arm(group := fake_groups(1)[0], weight=1.0)
    loss(m, batch(0)).backward()
    m[0].weight.grad.div_(2)
    with pytest.raises(GradientAfterLaunch, match=r"0\.weight"):
        buckets.reduce_fast(group, weight=1.0)


@pytest.mark.parametrize("owner_of", [(0, 1, 0), (1, 0, 1), (0, 0, 0), (1, 1, 0)])
def test_exact_gives_the_bits_of_one_process_for_any_deal(owner_of):
    def story(group):
        m = model()
        buckets = Buckets(m, bucket_bytes_max=SMALL)
        for shard, owner in enumerate(owner_of):
            if owner == group.rank():
                with buckets.shard(shard):
                    loss(m, batch(shard)).backward()
        buckets.reduce_exact(group, owner_of=owner_of, scale=1 / 3)
        return gradients(m)

    for got in each(fake_groups(2), story):
        assert torch.equal(got, mean_gradient(range(3)))


def test_a_shard_may_take_several_backwards():
    m = model()
    buckets = Buckets(m)
    with buckets.shard(0):
        for part in batch(0).split(1):
            (loss(m, part) / 5).backward()
    buckets.reduce_exact(fake_groups(1)[0], owner_of=(0,))
    torch.testing.assert_close(gradients(m), mean_gradient([0]))


def test_after_a_death_the_survivor_keeps_its_shard_and_runs_only_the_new_ones():
    network = FakeNetwork()
    groups = fake_groups(2, network=network)
    m, ran = model(), []
    buckets = Buckets(m, bucket_bytes_max=SMALL)

    def run(mine):
        for shard in mine:
            if shard not in buckets.shards:
                ran.append(shard)
                with buckets.shard(shard):
                    loss(m, batch(shard)).backward()

    run([0])
    groups[1].abort("killed")
    with pytest.raises(CollectiveFailed):
        buckets.reduce_exact(groups[0], owner_of=(0, 1), scale=0.5)
    assert all(p.grad is None for p in m.parameters())
    join(groups[:1], prefix="q2")
    run([0, 1])
    buckets.reduce_exact(groups[0], owner_of=(0, 0), scale=0.5)
    assert ran == [0, 1]
    assert torch.equal(gradients(m), mean_gradient([0, 1]))
    buckets.forget_shards()
    assert not buckets.shards


def test_a_shard_that_was_not_run_is_named():
    buckets = Buckets(m := model())
    with buckets.shard(0):
        loss(m, batch(0)).backward()
    with pytest.raises(BadDeal, match=r"shards \[1\] but has not run"):
        buckets.reduce_exact(fake_groups(1)[0], owner_of=(0, 0))


@pytest.mark.parametrize("operation", ["allreduce", "alltoall_base", "_allgather_base"])
def test_a_break_at_any_bucket_reaches_every_rank_as_one_error(operation):
    for after in range(3):
        network = FakeNetwork()
        groups = fake_groups(2, network=network)
        network.fail(operation, rank=1, after=after)

        def story(group, operation=operation):
            m = model()
            buckets = Buckets(m, bucket_bytes_max=SMALL)
            with buckets.shard(group.rank()):
                loss(m, batch(0)).backward()
            with pytest.raises((CollectiveFailed, GroupAborted)):
                if operation == "allreduce":
                    buckets.reduce_fast(group, weight=0.5)
                else:
                    buckets.reduce_exact(group, owner_of=(0, 1))

        each(groups, story)


def test_a_parameter_without_gradient_counts_as_zeros_and_is_said_once(caplog):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    m = Half()
    buckets = Buckets(m)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            m(torch.ones(1, 2)).sum().backward()
            buckets.reduce_fast(fake_groups(1)[0], weight=1.0)
    assert buckets.missing == {"unused.weight", "unused.bias"}
    assert m.unused.weight.grad.abs().sum() == 0
    assert len([r for r in caplog.records if r.message == "reduce.gradient_missing"]) == 2


def test_a_sparse_gradient_is_refused_by_name():
    m = nn.Embedding(4, 2, sparse=True)
    m(torch.tensor([1])).sum().backward()
    with pytest.raises(SparseGradient, match="weight"):
        Buckets(m).reduce_fast(fake_groups(1)[0], weight=1.0)


def test_parameters_of_different_dtypes_never_share_a_bucket():
    def story(group):
        m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
        buckets = Buckets(m)
        for p in m.parameters():
            p.grad = torch.full_like(p, group.rank() + 1.0)
        buckets.reduce_fast(group, weight=0.5)
        return len(buckets), {p.grad.mean().item() for p in m.parameters()}

    assert each(fake_groups(2), story) == [(2, {1.5})] * 2


def test_a_rank_that_brings_nothing_adds_nothing():
    def story(group):
        m = model()
        if group.rank() == 0:
            loss(m, batch(0)).backward()
        Buckets(m).reduce_fast(group, weight=1.0 - group.rank())
        return gradients(m)

    for got in each(fake_groups(2), story):
        assert torch.equal(got, mean_gradient([0]))


def test_frozen_parameters_are_left_alone():
    m = model()
    m[0].requires_grad_(False)
    loss(m, batch(0)).backward()
    Buckets(m).reduce_fast(fake_groups(1)[0], weight=1.0)
    assert m[0].weight.grad is None and m[2].weight.grad is not None
