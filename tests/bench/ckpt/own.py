"""What only ckpt does, with its figure: resharding, budgets, views, respawn, throttling.

`python -m tests.bench.ckpt own`; one measure runs as `python -m tests.bench.ckpt.own NAME DIR`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ckpt import Checkpointer, Place
from ckpt.meet import Alone
from tests.bench.ckpt.limits import seconds
from tests.bench.ckpt.states import make_state, size_bytes
from tests.bench.ckpt.worker import Peak, family, warm_up

Rows = list[list[str]]
State = dict[str, torch.Tensor]
MB = 1e6


def even_state() -> State:
    """25 tensors of 10.7 MB, as large as those of 2 GB in 200, that two ranks can halve."""
    names = list(state := make_state("mid"))
    pairs = zip(names[::2], names[1::2], strict=True)
    return {a: torch.cat([state[a], state[b]]) for a, b in pairs}


def sharded(state: State, rank: int) -> State:
    """Rank `rank`'s half of every tensor, as FSDP2 has it. No other rank has to be there."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    halves = {name: t.chunk(2)[rank].clone() for name, t in state.items()}
    return {n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in halves.items()}


def opened(directory: Path, *, rank: int = 0, ranks: int = 1) -> Checkpointer:
    place = Place(rank=rank, ranks=ranks)
    return Checkpointer(str(directory), place=place, session="bench", meeting=Alone())


def save_half(directory: Path, rank: str) -> None:
    """One of two ranks, in a process of its own."""
    state = sharded(even_state(), int(rank))
    with opened(directory, rank=int(rank), ranks=2) as checkpoints:
        checkpoints.save({"model": state}, step=1).wait_durable()


def restore_s(directory: Path, state: State, ranks: int) -> tuple[float, int]:
    """Seconds of a restore from the disk, the median of five, and the bytes that were read."""
    with opened(directory, ranks=ranks) as checkpoints:
        checkpoints._memory = lambda: None
        times = [seconds(lambda: checkpoints.restore({"model": state})) for _ in range(6)]
        assert checkpoints.last_restored is not None
        return statistics.median(times[1:]), checkpoints.last_restored.bytes


def reshard(directory: Path) -> Rows:
    state = even_state()
    of_one, of_two = directory / "one", directory / "two"
    with opened(of_one) as checkpoints:
        checkpoints.save({"model": state}, step=1).wait_durable()
    halves = [
        subprocess.Popen([sys.executable, "-m", __spec__.name, "save_half", str(of_two), rank])
        for rank in "01"
    ]
    assert not any(half.wait() for half in halves)
    (same, _), (merged, read) = (restore_s(d, state, 1) for d in (of_one, of_two))
    half = sharded(state, 0)
    (same_half, _), (split, read_half) = (restore_s(d, half, 2) for d in (of_two, of_one))
    most = max(read / size_bytes(state), 2 * read_half / size_bytes(state))
    return [
        ["load of 2 ranks' shards by 1", "1.15 × same layout", f"{merged / same:.2f}"],
        ["load of 1 rank's by each of 2", "1.15 × same layout", f"{split / same_half:.2f}"],
        ["bytes read of those needed", "1.05", f"{most:.3f}"],
    ]


def memory(directory: Path) -> Rows:
    state = make_state("mid")
    budget = size_bytes(state) // 4
    with Checkpointer(str(directory / "a"), staging_bytes_max=budget) as waves:
        with Peak() as bounded:
            handle = waves.save({"model": state}, step=1)
            warm_up()  # its optimizer waits
            handle.wait_durable()
        stall_s = waves.lost_s
    large = torch.randn(1 << 28)
    views = {"view": large[:10], "tied": large[64:128], "other": large[64:128]}
    with Checkpointer(str(directory / "b")) as checkpoints:
        with Peak() as viewed:
            checkpoints.save({"model": views}, step=1).wait_durable()
        stored = sum(p.stat().st_size for p in (directory / "b").rglob("*.safetensors"))
    over = (bounded.most - bounded.before) / budget
    return [
        ["extra memory with a budget of a quarter", "1 × budget", f"{over:.2f}"],
        ["– stall that the budget costs", "told", f"{stall_s:.2f} s"],
        ["extra memory for views of 1 GB", "1 MB", f"{(viewed.most - viewed.before) / MB:.1f} MB"],
        ["file with two views, one of them tied", "once", f"{stored} B"],
    ]


def respawn(directory: Path) -> Rows:
    state = {"model": make_state("mid")}
    with Checkpointer(str(directory)) as checkpoints:
        checkpoints.save(state, step=1).wait_durable()
        (daemon,) = family() - {os.getpid()}
        os.kill(daemon, signal.SIGKILL)
        start = time.perf_counter()
        checkpoints.save(state, step=2).wait_staged()
        while not family() - {os.getpid(), daemon}:
            time.sleep(0.005)
        there_s = time.perf_counter() - start
        checkpoints.wait()
        durable_s = time.perf_counter() - start
        assert checkpoints.restore(state) == 2
    return [
        ["new daemon after SIGKILL", "3 s", f"{there_s:.2f} s"],
        ["– the save that met it is durable", "succeeds", f"after {durable_s:.2f} s"],
    ]


def throttle(directory: Path) -> Rows:
    state = {"model": make_state("mid")}
    size, rate = size_bytes(state["model"]), 50 * MB
    with Checkpointer(str(directory), bytes_per_s=rate) as checkpoints:
        checkpoints.prepare(state)
        start = time.perf_counter()
        checkpoints.save(state, step=1).wait_durable()
        seen = size / (time.perf_counter() - start)
        (daemon,) = family() - {os.getpid()}
        nice = os.getpriority(os.PRIO_PROCESS, daemon)
    return [
        ["rate under a limit of 50 MB/s", "45 to 55", f"{seen / MB:.0f} MB/s"],
        ["niceness of the daemon", "lowered", f"{nice}, disk best-effort 7"],
    ]


MEASURES: dict[str, Callable[[Path], Rows]] = {
    "reshard": reshard,
    "memory": memory,
    "respawn": respawn,
    "throttle": throttle,
}


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if name == "save_half":
        save_half(directory, sys.argv[3])
        return
    warm_up()
    print("\nRESULT " + json.dumps({"rows": MEASURES[name](directory)}), flush=True)


if __name__ == "__main__":
    main()
