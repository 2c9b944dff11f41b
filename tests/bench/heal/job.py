"""Run a job in which one group joins: what the heal took, and what it cost the survivors."""

import json
import queue
import statistics
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.bench.heal.work import calibrate
from tests.bench.recovery.systems import ROOT, OurLighthouse, PeerLighthouse

HANG_S = 300.0
BEFORE = 3  # steps before the joiner comes
STEP_S = 0.6  # compute of one step for each GB of state
SETTLING, STEADY = 2, 5  # steps after its first one that do not count, and those that do

KINDS = {"ftcore": ("ours", OurLighthouse), "torchft": ("torchft", PeerLighthouse)}


class Trainer:
    """One replica group; `step`s and other events as they come."""

    def __init__(self, config):
        command = [sys.executable, "-m", "tests.bench.heal.trainer", json.dumps(config)]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=quiet, text=True, cwd=ROOT
        )
        self.events, self.seen = queue.SimpleQueue(), []
        threading.Thread(target=self._read, daemon=True).start()
        self.nbytes = self.wait("ready")["bytes"]

    def _read(self):
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put({"event": "ended"})

    def wait(self, event):
        while True:
            got = self.events.get(timeout=HANG_S)
            self.seen.append(got)
            if got["event"] == event:
                return got
            assert got["event"] != "ended", "a trainer ended: run it by hand to see why"

    def begin(self, product_s):
        self.process.stdin.write(f"{product_s}\n")
        self.process.stdin.flush()

    def forget_peak(self):
        """Let VmHWM be the peak from now on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        self.rss = self._memory("VmRSS")

    def grown(self):
        """Bytes by which the peak was above what was resident at `forget_peak`."""
        return self._memory("VmHWM") - self.rss

    def _memory(self, name):
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024

    def end(self):
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Seconds and bytes of one join. lost_s: the slowest survivor's."""

    nbytes: int
    heal_s: float
    lost_s: float
    step_s: float
    survivor_grown: int
    joiner_grown: int


def join(system, *, survivors, **config):
    kind, lighthouse = KINDS[system]
    with lighthouse() as place:
        base = {
            "kind": kind,
            "address": place.address,
            "survivors": survivors,
            "steps": 10**6,
            **config,
        }
        names = [f"r{i}" for i in range(survivors + 1)]
        trainers = [Trainer({**base, "name": n, "value": float(i)}) for i, n in enumerate(names)]
        try:
            return watch(trainers[:-1], trainers[-1], calibrate())
        finally:
            for trainer in trainers:
                trainer.end()


def watch(survivors, joiner, product_s):
    for trainer in survivors:
        trainer.begin(product_s)
    for trainer in survivors:
        while trainer.wait("step")["members"] < len(survivors):
            pass
        for _ in range(BEFORE):
            trainer.wait("step")
    for trainer in (*survivors, joiner):
        trainer.forget_peak()
    joiner.begin(product_s)
    healed = joiner.wait("healed")
    joined = joiner.wait("step")
    for trainer in survivors:
        while trainer.wait("step")["at"] < joined["at"]:
            pass
        for _ in range(SETTLING + STEADY):
            trainer.wait("step")
    window = (healed["at"] - healed["seconds"], joined["at"])
    lost = [lost_of(trainer.seen, window) for trainer in survivors]
    return Outcome(
        nbytes=joiner.nbytes,
        heal_s=healed["seconds"],
        lost_s=max(s for s, _ in lost),
        step_s=lost[0][1],
        survivor_grown=max(t.grown() for t in survivors),
        joiner_grown=joiner.grown(),
    )


def lost_of(events, window):
    """What the steps that overlap the heal took longer than the median of those after it, in which
    as many processes share the machine."""
    steps = [e for e in events if e["event"] == "step"]
    usual = statistics.median(e["seconds"] for e in steps[-STEADY:])
    during = [e for e in steps if e["at"] >= window[0] and e["at"] - e["seconds"] <= window[1]]
    return sum(e["seconds"] - usual for e in during), usual


def table(sizes, *, systems, repeats, survivors, trained, computes):
    """Lines of a table, as they are measured: the middle of `repeats` joins by what was lost."""
    yield "| state | compute | system | step | heal | rate | survivors lost | grown: both sides |"
    yield "|---|---|---|---|---|---|---|---|"
    for gb in sizes:
        for compute in computes:
            for system in systems:
                options = {"gb": gb, "trained": trained, "compute": compute, "step_s": STEP_S * gb}
                joins = [join(system, survivors=survivors, **options) for _ in range(repeats)]
                middle = sorted(joins, key=lambda j: j.lost_s)[len(joins) // 2]
                yield row(gb, compute, system, middle)


def row(gb, compute, system, it):
    return (
        f"| {gb:g} GB | {compute} | {system} | {it.step_s:.2f} s | {it.heal_s:.2f} s "
        f"| {it.nbytes / it.heal_s / 1e9:.2f} GB/s "
        f"| {it.lost_s:.2f} s ({it.lost_s / it.heal_s:.0%}) "
        f"| {it.survivor_grown / 1e9:.2f}, {it.joiner_grown / 1e9:.2f} GB |"
    )
