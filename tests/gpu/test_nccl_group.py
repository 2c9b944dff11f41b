"""What NcclGroup promises, on one GPU or several: `python -m pytest tests/gpu/test_nccl_group.py`.

With fewer GPUs than members, each member pretends to be a host of its own and NCCL uses sockets.
"""

import multiprocessing
import os
import signal
import time
import traceback

import pytest
import torch

from ftcore.process_group import host_store
from ftcore.process_group.errors import GroupError
from ftcore.process_group.nccl import NcclGroup, nccl_is_available
from ftcore.process_group.store import connect_store

pytestmark = pytest.mark.skipif(not nccl_is_available(), reason="NCCL and a GPU are needed")
HANG_S = 100.0
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "1",
}


class Member:
    def __init__(self, rank, size, address):
        self.rank, self.size, self.address = rank, size, address
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.group = NcclGroup(device=self.device)
        self.store = connect_store(address, timeout_s=HANG_S)

    def configure(self, quorum, *, size=None, timeout_s=60.0):
        self.group.configure(
            store_address=self.address,
            prefix=f"q{quorum}",
            rank=self.rank,
            world_size=size or self.size,
            timeout_s=timeout_s,
        )

    def total(self, numel=4):
        tensor = torch.full((numel,), self.rank + 1.0, device=self.device)
        self.group.allreduce([tensor]).wait()
        self.group.settle()
        return tensor[0].item()

    def meet(self, tag):
        self.store.add(f"meet/{tag}", 1)
        while self.store.add(f"meet/{tag}", 0) < self.size:
            time.sleep(0.002)


def run(story, rank, size, address, results):
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if torch.cuda.device_count() < size:
        os.environ.update(ONE_GPU, NCCL_HOSTID=f"member-{rank}")
    try:
        results.put((rank, story(Member(rank, size, address)), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    os._exit(0)  # a leaked NCCL thread must not hold the process


def everywhere(story, size, *, expected=None):
    """Run the story in `size` processes. Returns what each rank that answers returned."""
    context = multiprocessing.get_context("spawn")
    host, results = host_store(), context.SimpleQueue()
    members = [
        context.Process(target=run, args=(story, r, size, host.address, results), daemon=True)
        for r in range(size)
    ]
    for member in members:
        member.start()
    answers = {}
    deadline = time.monotonic() + HANG_S
    while len(answers) < (expected or size) and time.monotonic() < deadline:
        if results.empty():
            time.sleep(0.01)
            continue
        rank, answer, error = results.get()
        assert not error, f"rank {rank}:\n{error}"
        answers[rank] = answer
    for member in members:
        member.kill()
    return answers


def sums(member):
    member.configure(1)
    first = member.total()
    member.meet("a")
    member.configure(2)
    return first, member.total(1 << 20)


def test_all_members_get_the_sum_in_each_quorum():
    assert everywhere(sums, 2) == {0: (3.0, 3.0), 1: (3.0, 3.0)}


def survive(member):
    """Rank 2 is killed; the rest notice by settle() or are told by abort(), and go on as two."""
    member.configure(1)
    assert member.total() == 6.0
    member.meet("up")
    if member.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    began = time.monotonic()
    work = member.group.allreduce([torch.ones(1 << 22, device=member.device)])
    member.group.abort("member 2 was lost")
    with pytest.raises(GroupError):  # aborted, unless NCCL saw the death before
        member.group.settle()
    told_s = time.monotonic() - began
    assert work.exception() is not None
    member.configure(2, size=2)
    total = member.total()
    return round(total), told_s, time.monotonic() - began


def test_survivors_of_a_kill_go_on_when_told():
    answers = everywhere(survive, 3, expected=2)
    print({r: f"told {a[1]:.3f} s, next sum {a[2]:.3f} s" for r, a in answers.items()})
    assert [a[0] for a in answers.values()] == [3, 3]


def notice(member):
    """Nobody tells: settle() must not believe a collective that a dead peer took part in."""
    member.configure(1, timeout_s=5.0)
    member.total()
    member.meet("up")
    if member.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    began = time.monotonic()
    with pytest.raises(GroupError):
        member.total(1 << 20)
    return time.monotonic() - began


def test_a_dead_peer_is_never_taken_for_success():
    answers = everywhere(notice, 2, expected=1)
    print(f"noticed after {answers[0]:.3f} s")


def absent(member):
    """Rank 1 never comes: configure() ends at its limit and a later quorum works."""
    with pytest.raises(GroupError):
        member.configure(1, size=2, timeout_s=2.0)
    member.configure(2, size=1)
    return member.total()


def test_a_peer_that_never_comes_costs_a_thread_and_not_the_process():
    assert everywhere(absent, 1) == {0: 1.0}
