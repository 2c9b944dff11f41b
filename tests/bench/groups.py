"""Measure process groups over gloo: from a kill to the next sum, and what a call costs.

    python -m tests.bench.groups [--rounds 15] [--groups 3]

"bare" is torch's own ProcessGroupGloo in the same processes, rebuilt by hand after its error.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ftcore.process_group import GlooGroup, host_store
from ftcore.process_group.errors import GroupError
from ftcore.process_group.isolated import IsolatedGroup
from ftcore.process_group.store import connect_store

TIMEOUT_S = 30.0


class Ours:
    def __init__(self, address):
        self.address, self.group = address, GlooGroup()

    def build(self, prefix, rank, size):
        self.group.configure(
            store_address=self.address,
            prefix=prefix,
            rank=rank,
            world_size=size,
            timeout_s=TIMEOUT_S,
        )

    def sum(self, tensor):
        self.group.allreduce([tensor]).wait()


class Bare:
    def __init__(self, address):
        self.store, self.group = connect_store(address, timeout_s=TIMEOUT_S), None

    def build(self, prefix, rank, size):
        self.group = None
        store = dist.PrefixStore(prefix, self.store)
        self.group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))

    def sum(self, tensor):
        self.group.allreduce([tensor]).wait()


KINDS = {"ours": Ours, "bare gloo": Bare}


def killed(kind, rank, size, address, name, results):
    """The last rank is killed in mid-loop; the others report when they were told and went on."""
    torch.set_num_threads(1)
    store, member, tensor = (
        connect_store(address, timeout_s=TIMEOUT_S),
        kind(address),
        torch.ones(1000),
    )
    member.build(f"{name}/1", rank, size)
    for _ in range(20):
        member.sum(tensor)
    store.set(f"{name}/pid/{rank}", str(os.getpid()))
    victim = int(store.get(f"{name}/pid/{size - 1}"))
    turn = 0
    try:
        while True:
            turn += 1
            if rank == 0 and turn == 100:
                store.set(f"{name}/at", repr(time.time()))
                os.kill(victim, signal.SIGKILL)
            member.sum(tensor)
    except (GroupError, RuntimeError):
        told = time.time()
    at = float(store.get(f"{name}/at"))
    member.build(f"{name}/2", rank, size - 1)
    member.sum(tensor)
    results.put((told - at, time.time() - at))


def kill_rounds(context, address, rounds, size):
    for name, kind in KINDS.items():
        told, total = [], []
        for turn in range(rounds):
            results = context.SimpleQueue()
            arguments = (size, address, f"{name} {size} {turn}", results)
            members = [
                context.Process(target=killed, args=(kind, rank, *arguments))
                for rank in range(size)
            ]
            for member in members:
                member.start()
            answers = [results.get() for _ in range(size - 1)]
            for member in members:
                member.join()
            told.append(max(a for a, _ in answers))
            total.append(max(b for _, b in answers))
        show(f"kill one of {size}: {name}, error on all", told)
        show(f"kill one of {size}: {name}, first sum of the rest", total)


def show(name, seconds):
    ms = sorted(1e3 * s for s in seconds)
    print(f"{name:50} {statistics.median(ms):9.3f} {ms[0]:9.3f} {ms[-1]:9.3f}", flush=True)


def calls(rank, address, results):
    """Time a tiny all-reduce of two members, ours and bare in turns."""
    torch.set_num_threads(1)
    ours, bare, isolated = Ours(address), Bare(address), Ours(address)
    isolated.group = IsolatedGroup()
    for name, member in (("ours", ours), ("bare", bare), ("isolated", isolated)):
        member.build(f"calls/{name}", rank, 2)
    tensor, times = torch.ones(16), {"bare gloo": [], "ours": [], "isolated": []}
    for _ in range(15):
        for name, member in (("bare gloo", bare), ("ours", ours), ("isolated", isolated)):
            began = time.perf_counter()
            for _ in range(300):
                member.sum(tensor)
            times[name].append((time.perf_counter() - began) / 300)
    if rank == 0:
        results.put(times)
    ours.group.close()
    isolated.group.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", type=int, default=3)
    options = parser.parse_args()
    context, host = multiprocessing.get_context("fork"), host_store()
    print(f"{'milliseconds':50} {'median':>9} {'best':>9} {'worst':>9}")
    for size in sorted({2, options.groups}):
        kill_rounds(context, host.address, options.rounds, size)
    results = context.SimpleQueue()
    members = [context.Process(target=calls, args=(r, host.address, results)) for r in (0, 1)]
    for member in members:
        member.start()
    for name, seconds in results.get().items():
        show(f"one tiny all-reduce of 2: {name}", seconds)
    for member in members:
        member.join()


if __name__ == "__main__":
    main()
