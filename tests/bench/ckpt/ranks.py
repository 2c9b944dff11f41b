"""Two ranks that each hold half of a state: what a save costs the slower one.

`python -m tests.bench.ckpt ranks`; one rank runs as `python -m tests.bench.ckpt.ranks`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bench.ckpt.contestants import CONTESTANTS
from tests.bench.ckpt.limits import Limits
from tests.bench.ckpt.states import SIZES, change, make_state, size_bytes

RANKS = 2
SIZES_OF_TWO = {"big": "big", "mid": "mid", "small": "small5k"}
PEERS = ("ours", "dcp", "dcp process", "torch_checkpointing")


def half_of(size: str, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank, under names that no other rank has."""
    state = make_state(size, seed=rank)
    names = list(state)[: len(state) // RANKS]
    return {f"rank{rank}.{name}": state[name] for name in names}


def one_save(contestant) -> tuple[float, float]:
    """Seconds until staged and until durable, of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    contestant.save()
    contestant.wait_staged()
    staged_s = time.perf_counter() - start
    contestant.wait_durable()
    dist.barrier()
    durable_s = time.perf_counter() - start
    both: list[float] = [0.0] * RANKS
    dist.all_gather_object(both, staged_s)
    return max(both), durable_s


def measure(name: str, size: str, directory: Path, rank: int, saves: int) -> dict[str, object]:
    store = dist.FileStore(str(directory / "meet"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    state = half_of(size, rank)
    contestant = CONTESTANTS[name](directory / "data", state)
    limits = Limits(size_bytes(state) * RANKS, directory) if rank == 0 else None
    rows, bounds = [], []
    for step in range(1, saves + 2):
        if limits is not None and step > 1:
            bounds.append(limits.measure())
        dist.barrier()
        if step > 1 and rank == 0:
            contestant.forget()
        contestant.step = step
        change(state)
        rows.append(one_save(contestant))
    staged, durable = (statistics.median(r[i] for r in rows[1:]) for i in (0, 1))
    found: dict[str, object] = {"name": name, "size": size, "bytes": size_bytes(state) * RANKS}
    found |= {"staged_s": staged, "durable_s": durable}
    for key in bounds[0] if bounds else ():
        found[f"limit_{key}"] = statistics.median(b[key] for b in bounds)
    dist.barrier()
    contestant.close()
    return found


def main() -> None:
    name, size, directory, saves = sys.argv[1:]
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = measure(name, size, Path(directory), rank, int(saves))
    if rank == 0:
        print("\nRESULT " + json.dumps(found), flush=True)
    os._exit(0)  # a peer's threads may still wait for the group


assert set(SIZES_OF_TWO.values()) <= set(SIZES)
if __name__ == "__main__":
    main()
