"""Real processes that die or stop while they reduce."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from ftcore.process_group import GlooGroup, GroupAborted, host_store
from ftcore.process_group.errors import GroupError
from ftcore.process_group.store import connect_store

HANG_S = 60.0


def join(group, address, *, rank, size, quorum):
    group.configure(
        store_address=address,
        prefix=f"q{quorum}",
        rank=rank,
        world_size=size,
        timeout_s=HANG_S,
    )


def total(group, numel=1000):
    tensor = torch.ones(numel)
    group.allreduce([tensor]).wait()
    return tensor[0].item()


def victim(rank, size, address):
    """Reduce for ever, after saying its process id."""
    torch.set_num_threads(1)
    group = GlooGroup()
    join(group, address, rank=rank, size=size, quorum=1)
    connect_store(address, timeout_s=HANG_S).set("victim", str(os.getpid()))
    while True:
        total(group)


def survivor(rank, size, address, how, results):
    """Reduce with the victim, make it die or stop, go on without it."""
    torch.set_num_threads(1)
    group, store = GlooGroup(), connect_store(address, timeout_s=HANG_S)
    join(group, address, rank=rank, size=size, quorum=1)
    pid, began, error = int(store.get("victim")), 0.0, None
    try:
        for turn in range(1_000_000):
            if turn == 50 and rank == 0:
                began = time.monotonic()
                os.kill(pid, how)
                if how == signal.SIGSTOP:
                    group.abort("the victim is stopped")
                    store.set("stopped", "1")
            if turn == 50 and rank != 0 and how == signal.SIGSTOP:
                store.get("stopped")
                group.abort("the victim is stopped")
            total(group)
    except GroupError as caught:
        error = type(caught)
    join(group, address, rank=rank, size=size - 1, quorum=2)
    results.put((rank, error.__name__, total(group), time.monotonic() - began))
    group.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_survivors_reduce_on_without_a_killed_or_stopped_member(how):
    context, host, size = multiprocessing.get_context("spawn"), host_store(), 3
    results = context.SimpleQueue()
    dying = context.Process(target=victim, args=(2, size, host.address), daemon=True)
    living = [
        context.Process(target=survivor, args=(r, size, host.address, how, results), daemon=True)
        for r in (0, 1)
    ]
    for process in (dying, *living):
        process.start()
    for process in living:
        process.join(HANG_S)
    dying.kill()
    got = sorted(results.get() for _ in living)
    assert [(rank, sum_) for rank, _, sum_, _ in got] == [(0, 2.0), (1, 2.0)]
    print(f"{how.name} to the next sum: {1e3 * got[0][3]:.1f} ms")
    if how == signal.SIGSTOP:
        assert got[0][1] == GroupAborted.__name__
