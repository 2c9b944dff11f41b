"""What a process keeps after each end of an NCCL group: `python -m tests.gpu.nccl_leak`.

Two ranks on one GPU make a group, sum once and end it, many times; torch's backend alone and ours.
"""

import json
import multiprocessing
import os
import re
import sys
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


def held():
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


VARIANTS = {
    "torch, abort": (raw("abort"), {}),
    "torch, abort, no RAS": (raw("abort"), {"NCCL_RAS_ENABLE": "0"}),
    "torch, shutdown": (raw("shutdown"), {}),
    "ours": (ours, {}),
    "ours, no RAS": (ours, {"NCCL_RAS_ENABLE": "0"}),
}


def rank_main(name, rank, address, answers):
    round, env = VARIANTS[name]
    os.environ.update(ONE_GPU, NCCL_HOSTID=f"{name}-{rank}", **env)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    torch.cuda.set_device(0)
    before = Counter()
    for number in range(ROUNDS):
        round(rank, address, number)
        time.sleep(0.7)  # what ends in the background has ended
        if number == WARM - 1:
            before = held()
    grown = {k: (v - before[k]) / (ROUNDS - WARM) for k, v in held().items()}
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
