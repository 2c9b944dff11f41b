"""Does a healthy FSDP2 group live through the rejoins of another one? Ours beside torchft's.

    python -m tests.bench.rejoin [--rejoins 20] [--ranks 2] [--peer/--no-peer] [--show]

Two replica groups shard a model of six blocks by `fully_shard` over gloo; a forward takes 150 ms,
so that a rejoin comes in the middle of one. The second group is killed by SIGKILL and comes back,
again and again. Counted is how often all ranks of the first group live until both groups have
committed together. The peer's state functions are those of the model, called as it calls them;
`--show` prints what all processes say, so also why a survivor ended.
"""

import multiprocessing
import os
import queue
import signal
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist

from tests.bench.recovery.__main__ import our_lighthouse, peer_lighthouse

CONTEXT = multiprocessing.get_context("forkserver")
BLOCKS, BLOCK_S, WIDTH = 6, 0.025, 256
TOGETHER, HANG_S = 3, 60.0


class Block(torch.nn.Module):
    """Sleeps between using its two weights, as a long kernel would."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.up(x).tanh()
        time.sleep(BLOCK_S)
        return x + self.down(x)


def sharded_model():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ours(model, optimizer, x, config):
    from ftcore import Manager

    options = {"lighthouse": config["address"], "replica_id": config["name"]}
    with Manager(model, optimizer, shards=2, **options) as manager:
        for step in manager.steps(10**6):
            for _ in step:
                model(x).square().mean().backward()
            optimizer.step()
            yield len(step.members)


def torchft(model, optimizer, x, config):
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("torchft port", str(served.port))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        min_replica_size=1,
        replica_id=config["name"],
        lighthouse_addr=f"http://{config['address']}",
        store_addr="127.0.0.1",
        store_port=int(store.get("torchft port")),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    wrapped = OptimizerWrapper(manager, optimizer)
    while True:
        before = manager.current_step()
        wrapped.zero_grad()
        model(x).square().mean().backward()
        for work in [manager.allreduce(p.grad.to_local()) for p in model.parameters()]:
            work.wait()
        wrapped.step()
        if manager.current_step() > before:
            yield manager.num_participants()


KINDS = {"ours": ours, "torchft 0.2.0": torchft}


def rank_main(pipe, rank, config):
    """Says how many groups were in each step it committed."""
    torch.set_num_threads(1)
    if not config["is_shown"]:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config["ranks"])}
    place = f"file://{config['meeting']}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=config["ranks"])
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for members in KINDS[config["kind"]](model, optimizer, torch.randn(8, WIDTH), config):
        pipe.send(members)


class Group:
    """All ranks of one life of a replica group."""

    def __init__(self, folder, config):
        self.said = queue.SimpleQueue()
        config = {**config, "meeting": str(Path(folder) / f"{config['name']}-{time.time_ns()}")}
        self.processes = [self._start(rank, config) for rank in range(config["ranks"])]

    def _start(self, rank, config):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=rank_main, args=(there, rank, config), daemon=True)
        process.start()
        there.close()
        threading.Thread(target=self._read, args=(here,), daemon=True).start()
        return process

    def _read(self, pipe):
        try:
            while True:
                self.said.put(pipe.recv())
        except (EOFError, OSError):
            self.said.put(0)

    def trains_with(self, count):
        """Whether it commits TOGETHER steps of `count` groups; False when a rank ends."""
        seen, deadline = 0, time.monotonic() + HANG_S
        while seen < TOGETHER * len(self.processes):
            try:
                members = self.said.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if members == 0:
                return False
            seen += members == count
        return True

    @property
    def is_whole(self):
        return all(process.is_alive() for process in self.processes)

    def kill(self):
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def rejoins(kind, lighthouse, count, ranks, is_shown):
    """How often the survivor lived, and the seconds from each start to the common commits."""
    took, ended = [], 0
    with tempfile.TemporaryDirectory() as folder, lighthouse(2) as address:
        config = {"kind": kind, "address": address, "ranks": ranks, "is_shown": is_shown}
        survivor = Group(folder, {**config, "name": "survivor"})
        try:
            survivor.trains_with(1)
            for _ in range(count):
                began = time.perf_counter()
                other = Group(folder, {**config, "name": "other"})
                is_well = survivor.trains_with(2)
                other.kill()
                if is_well:
                    took.append(time.perf_counter() - began)
                else:
                    ended += not survivor.is_whole
                    survivor.kill()
                    survivor = Group(folder, {**config, "name": "survivor"})
                survivor.trains_with(1)
        finally:
            survivor.kill()
    return took, ended


@click.command()
@click.option("--rejoins", "count", default=20)
@click.option("--ranks", default=2, help="In each replica group.")
@click.option("--peer/--no-peer", default=True)
@click.option("--show", is_flag=True)
def main(count: int, ranks: int, peer: bool, show: bool) -> None:
    CONTEXT.set_forkserver_preload(["torch", "ftcore.manager", *(["torchft"] * peer)])
    print(f"2 groups of {ranks} ranks, FSDP2, gloo on loopback, forward {BLOCKS * BLOCK_S:.3f} s")
    lighthouses = {"ours": our_lighthouse, "torchft 0.2.0": peer_lighthouse()}
    for kind in KINDS if peer else ["ours"]:
        took, ended = rejoins(kind, lighthouses[kind], count, ranks, show)
        print(f"{kind:14} survivor lived through {len(took)} of {count} rejoins", end="")
        median = f"{statistics.median(took):.1f} s" if took else "never"
        print(f" (a rank of it ended in {ended}); ", end="")
        print(f"{TOGETHER} steps together {median} after a start", flush=True)


if __name__ == "__main__":
    main()
