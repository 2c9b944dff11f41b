"""One contestant in a process of its own: `python -m tests.bench.ckpt.worker NAME SIZE DIR`.

Prints one JSON object. Runs in the peer's own virtual environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.bench.ckpt.contestants import CONTESTANTS, Contestant
from tests.bench.ckpt.limits import Limits, drop_pages, seconds
from tests.bench.ckpt.states import change, make_state, same_bits, size_bytes

LOOP_S = 2.0
TRAINING_S = 3.0  # before the first save, in which peers may make ready what they can
FORWARD_S = 0.5  # forward and backward after a save, before the optimizer would change the state


def family() -> set[int]:
    """Processes with this one's runtime directory in their environment: also a daemon."""
    mark = f"CKPT_RUNTIME_DIR={os.environ['CKPT_RUNTIME_DIR']}".encode()
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes():
                found.add(int(environ.parent.name))
        except (OSError, ProcessLookupError):
            continue
    return found


def memory_bytes() -> int:
    """Memory of this process and its children, what they share counted once."""
    private, shared = 0, {}
    for pid in family():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            private += field_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss_Anon:")
            for inode, size in shared_bytes(Path(f"/proc/{pid}/smaps").read_text()):
                shared[inode] = max(size, shared.get(inode, 0))
    return private + sum(shared.values())


def field_bytes(text: str, name: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith(name)), f"{name} 0")
    return int(line.split()[1]) << 10


def shared_bytes(smaps: str) -> Iterator[tuple[str, int]]:
    """Memory files (memfd, /dev/shm) of a process: inode and pages present."""
    inode = ""
    for line in smaps.splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_memory = len(words) > 5 and words[5].startswith(("/memfd:", "/dev/shm/"))
            inode = words[4] if is_memory else ""
        elif words[0] == "Rss:" and inode:
            yield inode, int(words[1]) << 10


def warm_up() -> None:
    """What a process that trains has in memory anyway: an optimizer step imports half of torch."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class Peak:
    """The most memory seen inside the block, over what there was before."""

    def __enter__(self) -> Peak:
        self.before = self.most = memory_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            self.most = max(self.most, memory_bytes())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def one_save(contestant: Contestant) -> dict[str, float]:
    start = time.perf_counter()
    contestant.save()
    called = time.perf_counter()
    contestant.wait_staged()
    staged = time.perf_counter()
    contestant.wait_durable()
    end = time.perf_counter()
    return {"call_s": called - start, "staged_s": staged - start, "durable_s": end - start}


def matmul(work: torch.Tensor) -> None:
    torch.mm(work, work)


def python_loop(_: torch.Tensor) -> None:
    total = 0
    for number in range(60_000):
        total += number & 7


def lost_s(contestant: Contestant, step_of) -> float:
    """Seconds of training lost to one save: the loop waits for staging before it would update."""
    work = torch.randn(700, 700)

    def loop(until) -> tuple[int, float]:
        count, start = 0, time.perf_counter()
        while not until(time.perf_counter() - start):
            step_of(work)
            count += 1
        return count, time.perf_counter() - start

    before = loop(lambda t: t > LOOP_S)
    done = threading.Event()
    start = time.perf_counter()
    contestant.save()
    forward = 0
    while time.perf_counter() - start < FORWARD_S:
        step_of(work)
        forward += 1
    contestant.wait_staged()
    threading.Thread(target=lambda: (contestant.wait_done(), done.set())).start()
    count, _ = loop(lambda t: done.is_set() and t > LOOP_S)
    spent = time.perf_counter() - start
    after = loop(lambda t: t > LOOP_S)
    each_s = min(before[1] / before[0], after[1] / after[0])
    return spent - (count + forward) * each_s


def measure(name: str, size: str, directory: Path, *, saves: int, loops: bool) -> dict[str, object]:
    state = make_state(size)
    limits = Limits(size_bytes(state), directory)
    rows, bounds = [], []
    warm_up()
    with Peak() as peak:
        contestant = CONTESTANTS[name](directory / "data", state)
        time.sleep(TRAINING_S)
        first = one_save(contestant)
    for step in range(2, saves + 2):
        if step % 2 == 0:  # they cost as much time as the saves
            bounds.append(limits.measure())
        contestant.forget()
        change(state)
        contestant.step = step
        rows.append(one_save(contestant))
    found: dict[str, object] = {"name": name, "size": size, "bytes": size_bytes(state)}
    found |= {f"first_{key}": value for key, value in first.items()}
    found |= {key: statistics.median(r[key] for r in rows) for key in rows[0]}
    found |= {f"limit_{k}": statistics.median(b[k] for b in bounds) for k in bounds[0]}
    found["extra_bytes"] = peak.most - peak.before
    found["disk_bytes"] = stored_bytes(contestant.place())
    found |= loads(contestant, state)
    if loops:
        found |= losses(contestant)
    contestant.close()
    return found


def stored_bytes(place: Path) -> int:
    return sum(p.stat().st_size for p in place.rglob("*") if p.is_file())


def loads(contestant: Contestant, state: dict[str, torch.Tensor]) -> dict[str, object]:
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    warm_s = min(seconds(lambda: contestant.load(into)) for _ in range(2))
    right = same_bits(state, into)
    drop_pages(contestant.place())
    cold_s = seconds(lambda: contestant.load(into))
    return {"load_warm_s": warm_s, "load_cold_s": cold_s, "loads_same_bits": right}


def losses(contestant: Contestant) -> dict[str, float]:
    found = {}
    for name, step_of in (("matmul", matmul), ("python", python_loop)):
        contestant.forget()
        contestant.step += 1
        found[f"lost_{name}_s"] = lost_s(contestant, step_of)
    return found


def main() -> None:
    name, size, directory, saves, loops = sys.argv[1:]
    torch.set_num_threads(1)
    found = measure(name, size, Path(directory), saves=int(saves), loops=loops == "loops")
    print("\nRESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
