"""What a process keeps after each end of an NCCL group: `python -m tests.gpu.nccl_leak`.

Two ranks on one GPU make a group, sum once and end it, many times; torch's backend alone and ours.
"""

import ctypes
import json
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcore.demo.worker import ONE_GPU
from ftcore.process_group import host_store
from ftcore.process_group.nccl import NcclGroup
from ftcore.process_group.store import connect_store

ROUNDS, WARM = 16, 4


def held(is_trimmed):
    if is_trimmed:
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        facts = dict(line.split(":", 1) for line in status)
    kinds = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kinds[re.sub(r"[0-9]+|-\w+", "N", os.readlink(f"/proc/self/fd/{number}"))] += 1
    sizes = {k: int(facts[k].split()[0]) / 1024 for k in ("RssAnon", "RssFile", "RssShmem")}
    return Counter({**sizes, "threads": int(facts["Threads"]), **kinds})


def raw(end):
    """torch's backend as it is; `end` is the way it ends."""

    def round(rank, address, number):
        store = dist.PrefixStore(f"r{number}", connect_store(address, timeout_s=60))
        options = dist.ProcessGroupNCCL.Options()
        backend = dist.ProcessGroupNCCL(store, rank, 2, options)
        tensor = torch.ones(1000, device="cuda")
        backend.allreduce([tensor], c10d.AllreduceOptions()).wait()
        torch.cuda.synchronize()
        getattr(backend, end)()

    return round


def ours(rank, address, number):
    global group
    if number == 0:
        group = NcclGroup(device=torch.device("cuda", 0))
    prefix = f"r{number}"
    group.configure(store_address=address, prefix=prefix, rank=rank, world_size=2, timeout_s=60.0)
    group.allreduce([torch.ones(1000, device="cuda")]).wait()
    group.settle()


def built_and_aborted_by_threads(rank, address, number):
    """torch's backend, the old one aborted by a thread of its own while the new one is built."""
    global backend
    old = backend if number else None
    if old is not None:
        threading.Thread(target=old.abort).start()
    store = dist.PrefixStore(f"r{number}", connect_store(address, timeout_s=60))

    def build():
        global backend
        backend = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
        backend.allreduce([torch.ones(1000, device="cuda")], c10d.AllreduceOptions()).wait()
        torch.cuda.synchronize()

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()


def one_after_the_other(rank, address, number):
    """Ours, when nothing of the old group is left while the new one is built."""
    ours(rank, address, number)
    group.abort()
    time.sleep(0.8)


VARIANTS = {
    "torch, abort": (raw("abort"), False),
    "torch, aborted by a thread": (built_and_aborted_by_threads, False),
    "ours": (ours, False),
    "ours, what malloc keeps given back": (ours, True),
    "ours, one after the other": (one_after_the_other, False),
}


def rank_main(name, rank, address, answers):
    round, is_trimmed = VARIANTS[name]
    os.environ.update(ONE_GPU, NCCL_HOSTID=f"{name}-{rank}")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    torch.cuda.set_device(0)
    before = Counter()
    for number in range(ROUNDS):
        round(rank, address, number)
        time.sleep(0.7)  # what ends in the background has ended
        if number == WARM - 1:
            before = held(is_trimmed)
    after = held(is_trimmed)
    grown = {k: (v - before[k]) / (ROUNDS - WARM) for k, v in after.items()}
    answers.put((name, {k: round_off(v) for k, v in grown.items() if abs(v) > 0.05}))
    os._exit(0)


def round_off(value):
    return float(f"{value:.2f}")


def main():
    if not torch.cuda.is_available():
        print("skipped: this needs a GPU")
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ftcore.process_group.nccl"])
    stores, answers = [host_store() for _ in VARIANTS], context.SimpleQueue()
    for name, store in zip(VARIANTS, stores, strict=True):
        for rank in range(2):
            given = (name, rank, store.address, answers)
            context.Process(target=rank_main, args=given, daemon=True).start()
    for _ in range(2 * len(VARIANTS)):
        name, grown = answers.get()
        print(json.dumps({"what": name, "grown per round (MiB, or a number)": grown}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
