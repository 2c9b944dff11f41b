"""Twenty kills in one run over NCCL: what survivors lose and what they leak:
`python -m tests.gpu.kills [KILLS]`. Prints one JSON object per kill and a summary."""

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from tests.gpu import trainer
from tests.manager.jobs import Job, together


def descriptors(process):
    """How many file descriptors of each kind a process has."""
    found = Counter()
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        with suppress(OSError):
            found[re.sub(r"[0-9]+", "N", os.readlink(f"/proc/{process.pid}/fd/{number}"))] += 1
    return found


def kill_once(number, survivors, victim):
    """Kill the victim in mid-step; seconds until all survivors have committed without it."""
    for group in survivors:
        group.events.clear()
    victim.wait("shard")
    killed_at = time.time()
    victim.kill()
    names = tuple(group.name for group in survivors)
    commits = [group.wait("step.committed", members=names)["at"] for group in survivors]
    audits = [group.wait("audit") for group in survivors]
    seconds = max(commits) - killed_at
    facts = {k: v for k, v in audits[0].items() if k not in ("event", "at", "step")}
    print(json.dumps({"kill": number, "next_commit_ms": round(1e3 * seconds), **facts}), flush=True)
    return seconds, facts


def main(kills):
    if not torch.cuda.is_available():
        print("skipped: this needs a GPU")
        return
    folder = tempfile.TemporaryDirectory()
    config = {"steps": 100_000, "step_time_s": 0.02, "audits": True}
    with folder as path, Job(Path(path), main=trainer.main, **config) as job:
        survivors = job.start_all("r0", "r1")
        pids, early_fds = [group.process.pid for group in survivors], Counter()
        found, back = [], []
        for number in range(1, kills + 1):
            started = time.time()
            victim = job.start("r2")
            together(*survivors, victim)
            back.append(time.time() - started)
            found.append(kill_once(number, survivors, victim))
            victim.process.join()
            if number == min(5, kills):
                early_fds = descriptors(survivors[0].process)
        more_fds = descriptors(survivors[0].process) - early_fds
        assert [g.process.pid for g in survivors if g.process.is_alive()] == pids
    seconds = [s for s, _ in found]
    early, last = found[min(4, kills - 1)][1], found[-1][1]
    grown = {key: round(last[key] - early[key], 2) for key in last}
    times = {"median_ms": statistics.median(seconds) * 1e3, "max_ms": max(seconds) * 1e3}
    times |= {"back_s": statistics.median(back)}
    rounded = {key: round(value, 1) for key, value in times.items()}
    print(json.dumps({"kills": kills, **rounded, "grown_since_kill_5": grown}))
    print(json.dumps({"descriptors more than after kill 5": more_fds}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
