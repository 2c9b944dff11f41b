"""Measure gradient reduction over gloo: ours beside DistributedDataParallel, in the same processes.

python -m tests.bench.reduce [--megabytes 100] [--groups 3] [--rounds 7]
"""

import argparse
import multiprocessing
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from ftcore.process_group import GlooGroup, host_store
from ftcore.reduce.buckets import Buckets


def big_model(megabytes):
    """Square linear layers of 4 MB, so that backward itself is cheap with a batch of one."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(megabytes // 4)))


def tiny_model():
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())))


def timed(step, rounds, group):
    """The median over rounds of the slowest rank's time, in milliseconds."""
    times = []
    for _ in range(rounds + 2):
        group.barrier().wait()
        start = time.perf_counter()
        step()
        slowest = torch.tensor([time.perf_counter() - start])
        group.allreduce([slowest], MAX).wait()
        times.append(slowest.item() * 1e3)
    return statistics.median(times[2:]), min(times[2:])


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
    big, tiny = (lambda: big_model(options.megabytes)), tiny_model
    for name, step in variants(big, torch.randn(1, 1024), group).items():
        results.put(("big", name, *timed(step, options.rounds, group)))
    for name, step in variants(tiny, torch.randn(16, 64), group).items():
        results.put(("tiny", name, *timed(step, 40 * options.rounds, group)))
    group.barrier().wait()
    group.close()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    results, host = context.SimpleQueue(), host_store()
    members = [
        context.Process(target=member, args=(rank, host.address, options, results))
        for rank in range(options.groups)
    ]
    for process in members:
        process.start()
    for process in members:
        process.join()
    table = {}
    while not results.empty():
        size, name, median, best = results.get()
        table.setdefault((size, name), (median, best))
    print(f"{options.groups} groups, gloo, one thread each; milliseconds a step, slowest rank")
    print(f"{'model':6} {'variant':30} {'median':>9} {'best':>9}")
    for (size, name), (median, best) in table.items():
        print(f"{size:6} {name:30} {median:9.2f} {best:9.2f}")


if __name__ == "__main__":
    main()
