"""Measure gradient reduction over gloo: ours beside DistributedDataParallel, in the same processes.

python -m tests.bench.reduce [--megabytes 100] [--groups 3] [--rounds 7]
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from ftcore.process_group import GlooGroup
from ftcore.reduce.buckets import Buckets
from tests.bench.members import parse_options, run_members


def big_model(megabytes):
    """Square linear layers of 4 MB, so that backward itself is cheap with a batch of one."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(megabytes // 4)))


def tiny_model():
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())))


def timed(step, group):
    """The slowest rank's time, in milliseconds."""
    group.barrier().wait()
    start = time.perf_counter()
    step()
    slowest = torch.tensor([time.perf_counter() - start])
    group.allreduce([slowest], MAX).wait()
    return slowest.item() * 1e3


def in_turns(steps, rounds, group):
    """name -> times over `rounds`: all variants in each round, so that a loaded machine is as slow
    for one as for another. Two rounds are for warming up."""
    times = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            times[name].append(timed(step, group))
    return {name: found[2:] for name, found in times.items()}


def make_max():
    options = dist.distributed_c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


MAX = make_max()


def variants(make, x, group):
    """name -> a function that runs one backward and reduces. Each has a model of its own, since
    hooks stay on parameters."""
    size = group.size()
    plain, ddp, ours = make(), nn.parallel.DistributedDataParallel(make()), make()
    views = nn.parallel.DistributedDataParallel(make(), gradient_as_bucket_view=True)
    buckets, late, exactly = Buckets(ours), Buckets(at_end := make()), Buckets(ordered := make())

    def backward(model):
        model.zero_grad()
        model(x).square().mean().backward()

    def overlapped():
        buckets.arm(group, weight=1 / size)
        backward(ours)
        buckets.reduce_fast(group, weight=1 / size)

    def at_the_end():
        backward(at_end)
        late.reduce_fast(group, weight=1 / size)

    def exact():
        exactly.forget_shards()
        with exactly.shard(group.rank()):
            ordered(x).square().mean().backward()
        exactly.reduce_exact(group, owner_of=range(size), scale=1 / size)

    return {
        "backward alone": lambda: backward(plain),
        "DDP": lambda: backward(ddp),
        "DDP, gradient_as_bucket_view": lambda: backward(views),
        "fast, overlapped": overlapped,
        "fast, at the end": at_the_end,
        "exact": exact,
    }


def member(rank, address, options, results):
    torch.set_num_threads(1)
    host, port = address.split(":")
    store = dist.PrefixStore("ddp", dist.TCPStore(host, int(port), None, False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.groups)
    group = GlooGroup()
    group.configure(
        store_address=address, prefix="ours", rank=rank, world_size=options.groups, timeout_s=120
    )
    big = variants(lambda: big_model(options.megabytes), torch.randn(1, 1024), group)
    tiny = variants(tiny_model, torch.randn(16, 64), group)
    for size, steps, rounds in (("big", big, options.rounds), ("tiny", tiny, 40 * options.rounds)):
        for name, times in in_turns(steps, rounds, group).items():
            results.put((size, name, statistics.median(times), min(times)))
    group.barrier().wait()
    group.close()
    dist.destroy_process_group()


def main():
    options = parse_options()
    results = run_members(member, options)
    table = {}
    for size, name, median, best in results:
        table.setdefault((size, name), (median, best))
    print(
        f"{options.groups} groups, gloo, one thread each; milliseconds a step, slowest rank; ",
        end="",
    )
    print(f"{options.megabytes} MB or 0.1 MB of gradients")
    print(f"{'model':6} {'variant':30} {'median':>9} {'best':>9}")
    for (size, name), (median, best) in table.items():
        print(f"{size:6} {name:30} {median:9.2f} {best:9.2f}")


if __name__ == "__main__":
    main()
