"""What every process group promises, told once for all of them."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcore.base.errors import BadSetting
from ftcore.process_group import GlooGroup, GroupAborted, host_store
from ftcore.process_group.errors import GroupError, GroupNotBuilt, GroupNotConfigured
from ftcore.process_group.fake import FakeGroup, FakeNetwork
from ftcore.process_group.isolated import IsolatedGroup
from ftcore.process_group.nccl import NcclGroup, nccl_is_available
from tests.process_group.world import HANG_S, World


def fake_group():
    network = FakeNetwork()
    return lambda **options: FakeGroup(network, **options)


KINDS = {"fake": fake_group, "gloo": lambda: GlooGroup, "isolated": lambda: IsolatedGroup}


@pytest.fixture(params=sorted(KINDS))
def make(request):
    """Makes groups that can meet each other."""
    return KINDS[request.param]()


@pytest.fixture
def world(make):
    worlds = []
    host = host_store()

    def build(size, *, make=make, **options):
        worlds.append(World(make, size, address=host.address, **options))
        return worlds[-1]

    yield build
    for each in worlds:
        each.close()


def ones(n=4):
    return torch.ones(n)


def total(group, value=1.0):
    tensor = torch.full((4,), value)
    group.allreduce([tensor]).wait()
    return tensor[0].item()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_members_get_the_sum(world, size):
    values = world(size).each(lambda group: total(group, group.rank() + 1.0))
    assert values == [size * (size + 1) / 2] * size


@pytest.mark.parametrize("size", [1, 3])
def test_gather_broadcast_and_barrier(world, size):
    def story(group):
        output = torch.empty(size)
        group._allgather_base(output, torch.tensor([float(group.rank())])).wait()
        tensor = torch.tensor([float(group.rank() + 5)])
        group.broadcast([tensor]).wait()
        group.barrier().wait()
        return output.tolist(), tensor.item()

    assert world(size).each(story) == [([float(r) for r in range(size)], 5.0)] * size


@pytest.mark.parametrize("size", [1, 3])
def test_uneven_slices_go_to_their_ranks(world, size):
    """Rank r sends j+1 numbers r to rank j."""

    def story(group):
        r = group.rank()
        sizes = [j + 1 for j in range(size)]
        output = torch.empty(size * (r + 1))
        source = torch.full((sum(sizes),), float(r))
        group.alltoall_base(output, source, [r + 1] * size, sizes).wait()
        return output.tolist()

    got = world(size).each(story)
    assert got == [[float(j) for j in range(size) for _ in range(r + 1)] for r in range(size)]


def test_torch_functions_accept_the_group(world):
    def story(group):
        tensor = ones()
        dist.all_reduce(tensor, group=group)
        output = torch.empty(3)
        dist.all_gather_into_tensor(output, tensor[:1], group=group)
        return output.tolist()

    assert world(3).each(story) == [[3.0, 3.0, 3.0]] * 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("size", [1, 3])
def test_each_torch_function_does_what_it_says(world, size):
    def story(group):
        r, me = float(group.rank()), torch.tensor([float(group.rank())])
        listed = [torch.empty(1) for _ in range(size)]
        dist.all_gather(listed, me, group=group)
        scattered = torch.empty(1)
        dist.reduce_scatter(scattered, [torch.tensor([r + j]) for j in range(size)], group=group)
        flat = torch.empty(1)
        dist.reduce_scatter_tensor(flat, torch.arange(float(size)) + r, group=group)
        swapped = torch.empty(size)
        dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * r, group=group)
        largest = me.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return [t.item() for t in listed], scattered.item(), flat.item(), swapped.tolist(), largest

    ranks = [float(r) for r in range(size)]
    for r, got in enumerate(world(size).each(story)):
        total = sum(ranks) + size * r
        assert got == (ranks, total, total, [r + 10 * j for j in ranks], ranks[-1])


def test_gather_and_scatter_have_a_root(world):
    def story(group):
        me, options = torch.tensor([float(group.rank())]), c10d.GatherOptions()
        options.rootRank = 1
        whole = [[torch.empty(1) for _ in range(2)]] if group.rank() == 1 else []
        group.gather(whole, [me], options).wait()
        parts, scattering = [torch.tensor([5.0]), torch.tensor([6.0])], c10d.ScatterOptions()
        mine = torch.empty(1)
        group.scatter([mine], [parts] if group.rank() == 0 else [], scattering).wait()
        return [t.item() for t in whole[0]] if whole else [], mine.item()

    assert world(2).each(story) == [([], 5.0), ([0.0, 1.0], 6.0)]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (1, 0, 0)])
def test_slices_are_gathered_in_place_whatever_their_sizes(world, sizes):
    def story(group):
        whole = torch.full((sum(sizes),), -1.0)
        whole.split(sizes)[group.rank()].fill_(group.rank())
        group.gather_slices(whole, sizes).wait()
        return whole.tolist()

    expected = [float(r) for r, n in enumerate(sizes) for _ in range(n)]
    assert world(3).each(story) == [expected] * 3


def test_messages_between_two_members(world):
    def story(group):
        tensor = torch.full((3,), float(group.rank()))
        work = group.send([tensor], 1) if group.rank() == 0 else group.recv([tensor], 0)
        work.wait()
        return tensor.tolist()

    assert world(2).each(story) == [[0.0] * 3] * 2


def test_abort_ends_a_wait_for_a_peer_that_never_comes(world):
    w = world(2, timeout_s=HANG_S)
    waiting = w.later(total, w.groups[0])
    w.groups[0].abort("the peer is stopped")
    with pytest.raises(GroupAborted, match="the peer is stopped") as caught:
        waiting.result(HANG_S / 2)
    assert caught.value.retryable


def test_after_an_error_everything_fails_with_it_until_the_next_quorum(world):
    w = world(2)
    assert w.groups[0].error() is None
    w.each(lambda group: group.abort("first"))
    w.groups[0].abort("second")
    with pytest.raises(GroupAborted, match="first"):
        w.groups[0].allreduce([ones()]).wait()
    with pytest.raises(GroupAborted, match="first"):
        w.groups[0].settle()
    w.configure("q2")
    assert w.groups[0].error() is None
    assert w.each(total) == [2.0, 2.0]


def test_members_that_abort_together_all_end_in_an_error(world):
    w = world(3, timeout_s=HANG_S)
    waiting = [w.later(total, group) for group in w.groups[:2]]  # the third never comes
    for group in w.groups:
        group.abort("member lost")
    for each in waiting:
        with pytest.raises(GroupError):
            each.result(HANG_S / 2)


def test_the_survivors_go_on_with_a_smaller_quorum_and_grow_again(world):
    w = world(3)
    w.groups[2].abort("leaves")
    w.configure("q2", members=w.groups[:2])
    assert w.each(total, members=w.groups[:2]) == [2.0, 2.0]
    w.configure("q3", members=w.groups[:1])
    assert total(w.groups[0]) == 1.0
    w.configure("q4")
    assert w.each(total) == [3.0, 3.0, 3.0]


def test_an_old_work_reports_its_own_quorum(world):
    w = world(2)
    w.each(lambda group: group.abort("q1 is over"))
    old = w.groups[0].allreduce([ones()])
    w.configure("q2")
    with pytest.raises(GroupAborted, match="q1 is over"):
        old.wait()
    assert w.groups[0].error() is None


def test_abort_ends_a_configure_whose_peer_never_comes(world, make):
    group, started = make(), threading.Event()
    w = world(1)

    def join():
        started.set()
        group.configure(store_address=w.address, prefix="x", rank=0, world_size=2, timeout_s=HANG_S)

    joining = w.later(lambda _: join(), None)
    started.wait()
    while not joining.done():
        group.abort("member lost")
    with pytest.raises(GroupAborted, match="member lost"):
        joining.result()


def test_a_peer_that_never_comes_is_named_after_the_time_limit(make, world):
    address = world(1).address
    with pytest.raises(GroupNotBuilt, match=r"rank 0 of 2.*within 0.2 s") as caught:
        make().configure(store_address=address, prefix="y", rank=0, world_size=2, timeout_s=0.2)
    assert caught.value.retryable


def test_held_errors_show_only_in_error(world, make):
    w = world(2, make=lambda: make(hold_errors=True))
    w.each(lambda group: group.abort("the peer is gone"))
    assert w.groups[0].allreduce([ones()]).wait() is True
    assert "the peer is gone" in str(w.groups[0].error())


def test_a_collective_before_the_first_quorum_is_refused(make):
    with pytest.raises(GroupNotConfigured, match="allreduce"):
        make().allreduce([ones()])


@pytest.mark.parametrize("rank, size, timeout_s", [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_a_rank_or_limit_that_cannot_be_is_refused(make, rank, size, timeout_s):
    with pytest.raises(BadSetting):
        make().configure(
            store_address="", prefix="", rank=rank, world_size=size, timeout_s=timeout_s
        )


def test_a_store_address_that_is_none_is_refused(make):
    with pytest.raises(BadSetting, match="not host:port"):
        make().configure(store_address="nowhere", prefix="", rank=0, world_size=2, timeout_s=5)


@pytest.mark.skipif(nccl_is_available(), reason="this machine has NCCL: see tests/gpu")
def test_nccl_without_a_gpu_is_refused_with_the_way_out():
    with pytest.raises(BadSetting, match="NCCL is not available") as caught:
        NcclGroup()
    assert "GlooGroup" in caught.value.remedy
