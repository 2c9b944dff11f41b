"""Gradient reduction and quantized averages over NCCL, on one GPU or several."""

import pytest
import torch
from torch import nn

from ftcore.local_sgd.outer_reduce import start_average
from ftcore.process_group.nccl import nccl_is_available
from ftcore.reduce.buckets import Buckets
from tests.gpu.test_nccl_group import everywhere

pytestmark = pytest.mark.skipif(not nccl_is_available(), reason="NCCL and a GPU are needed")


def model(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 64), nn.Tanh(), nn.Linear(64, 5)).to(device)


def backward(m, shard):
    x = torch.randn(8, 37, generator=torch.Generator().manual_seed(shard))
    m(x.to(next(m.parameters()).device)).pow(2).mean().backward()


def gradients(m):
    return torch.cat([p.grad.flatten() for p in m.parameters()]).cpu().tolist()


def exact(member):
    """The same three shards, dealt in three ways."""
    found = []
    for quorum, owner_of in enumerate([(0, 1, 1), (1, 0, 1), (0, 0, 0)]):
        member.configure(quorum)
        m = model(member.device)
        buckets = Buckets(m, bucket_bytes_max=3000)
        for shard, owner in enumerate(owner_of):
            if owner == member.rank:
                with buckets.shard(shard):
                    backward(m, shard)
        buckets.reduce_exact(member.group, owner_of=owner_of, scale=1 / 3)
        member.group.settle()
        found.append(gradients(m))
    return found


def test_exact_gives_the_same_bits_for_every_deal():
    answers = everywhere(exact, 2)
    first = answers[0][0]
    assert all(found == first for rank in answers for found in answers[rank])


def fast(member):
    member.configure(1)
    m = model(member.device)
    buckets = Buckets(m, bucket_bytes_max=3000)
    buckets.arm(member.group, weight=0.5)
    backward(m, member.rank)
    buckets.reduce_fast(member.group, weight=0.5)
    member.group.settle()
    twin = model(member.device)
    for shard in range(2):
        backward(twin, shard)
    expected = torch.tensor(gradients(twin)) / 2
    torch.testing.assert_close(torch.tensor(gradients(m)), expected)
    return gradients(m)


def test_fast_overlapped_gives_the_mean():
    answers = everywhere(fast, 2)
    assert answers[0] == answers[1]


def averages(member):
    member.configure(1)
    mine = torch.randn(5000, generator=torch.Generator().manual_seed(member.rank))
    mine, out, found = mine.to(member.device), torch.empty(5000, device=member.device), []
    for kind in (None, "int8", "fp8"):
        running = start_average(member.group, mine, givers=[0, 1], out=out, quantize=kind)
        running.gather()
        running.wait()
        member.group.settle()
        found.append(out.cpu().tolist())
    return found


def test_quantized_averages_are_equal_on_all_and_near_the_truth():
    answers = everywhere(averages, 2)
    assert answers[0] == answers[1]
    truth, int8, fp8 = (torch.tensor(found) for found in answers[0])
    assert (int8 - truth).abs().max() < 0.05 and (fp8 - truth).abs().max() < 0.4
