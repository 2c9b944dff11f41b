"""How long survivors stand still, and what a step costs: ours beside torchft and plain DDP.

`python -m tests.bench.recovery [--trials 5] [--peer/--no-peer]` prints a table. Everything runs in
turn on this machine, over loopback and gloo, with the tiny model of trainer.py.
"""

import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import click

from ftcore.demo.processes import Lighthouse

ROOT = Path(__file__).parents[3]
TRAINER = Path(__file__).with_name("trainer.py")
HANG_S = 120.0
STEADY = 100  # commits before anything is killed


@contextmanager
def our_lighthouse(groups):
    with tempfile.TemporaryDirectory() as folder:
        place = Lighthouse(Path(folder), replicas_min=1, log_level="ERROR")
        try:
            yield place.address
        finally:
            place.kill()


def peer_lighthouse(*options):
    @contextmanager
    def lighthouse(groups):
        address = f"127.0.0.1:{free_port()}"
        command = ["torchft_lighthouse", "--bind", address, "--min_replicas", "1", *options]
        env = {**os.environ, "RUST_LOG": "off"}
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=env)
        wait_port(address)
        try:
            yield address
        finally:
            process.kill()
            process.wait()

    return lighthouse


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_port(address):
    host, port = address.split(":")
    for _ in range(200):
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nothing listens at {address}")


class Trainer:
    def __init__(self, config):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RUST_LOG": "off"}
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self.lines = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)

    def commit(self):
        """(step, wall time) of the next commit."""
        step, at = self.lines.get(timeout=HANG_S).split()
        return int(step), float(at)

    def commit_after(self, when):
        while (found := self.commit())[1] <= when:
            pass
        return found

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


SYSTEMS = {
    "ftcore, defaults": ({"kind": "ours", "mode": "fast"}, our_lighthouse),
    "torchft, defaults": ({"kind": "torchft", "heartbeat_ms": 100}, peer_lighthouse()),
    "torchft, best tuned": (
        {"kind": "torchft", "heartbeat_ms": 50},
        peer_lighthouse("--heartbeat_timeout_ms", "200", "--quorum_tick_ms", "10"),
    ),
}


def stall(system, groups, number):
    """Seconds from the signal to the last survivor's next commit, and steps that were skipped."""
    kind, lighthouse = SYSTEMS[system]
    with lighthouse(groups) as address:
        base = {**kind, "groups": groups, "steps": 10**6, "tell": True, "address": address}
        trainers = [Trainer({**base, "name": f"r{i}"}) for i in range(groups)]
        try:
            for trainer in trainers:
                for _ in range(STEADY):
                    trainer.commit()
            time.sleep(0.5)
            at = time.time()
            trainers[-1].process.send_signal(number)
            # A commit that was under way is no answer: take the first after a gap.
            return max(first_after_gap(t, at) for t in trainers[:-1]) - at
        finally:
            for trainer in trainers:
                trainer.end()


def first_after_gap(trainer, at):
    """The first commit after the longest pause that begins within a second of the signal."""
    commits = [trainer.commit_after(at - 0.2)]
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline and commits[-1][1] < at + 1.0:
        commits.append(trainer.commit())
    pauses = [(b[1] - a[1], b[1]) for a, b in pairwise(commits) if b[1] > at]
    return max(pauses)[1]


def step_times(kind, groups, steps):
    """p50 of a step in seconds without failures, over the second half."""
    if kind["kind"] == "ddp":
        return run_to_end({**kind, "port": free_port()}, groups, steps)
    lighthouse = our_lighthouse if kind["kind"] == "ours" else peer_lighthouse()
    with lighthouse(groups) as address:
        return run_to_end({**kind, "address": address}, groups, steps)


def run_to_end(config, groups, steps):
    config = {**config, "groups": groups, "steps": steps, "tell": False}
    trainers = [Trainer({**config, "rank": i, "name": f"r{i}"}) for i in range(groups)]
    try:
        return statistics.median(json.loads(t.lines.get(timeout=HANG_S))["0.5"] for t in trainers)
    finally:
        for trainer in trainers:
            trainer.end()


@click.command()
@click.option("--trials", default=5, show_default=True)
@click.option("--steps", default=2000, show_default=True, help="For the step times.")
@click.option("--peer/--no-peer", default=True, show_default=True, help="Run torchft beside us.")
def main(trials, steps, peer):
    systems = [name for name in SYSTEMS if peer or name.startswith("ftcore")]
    print(f"load average at the start: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}\n")
    print("| signal | groups | system | median | slowest | trials |\n|---|---|---|---|---|---|")
    for number, groups in ((signal.SIGKILL, 2), (signal.SIGKILL, 3), (signal.SIGSTOP, 2)):
        for system in systems:
            if number == signal.SIGSTOP and system == "torchft, defaults":
                continue  # it waits out its collective time-out
            found = sorted(stall(system, groups, number) for _ in range(trials))
            middle = statistics.median(found)
            print(
                f"| {number.name} | {groups} | {system} | {middle:.3f} s | {found[-1]:.3f} s "
                f"| {trials} |",
                flush=True,
            )
    print("\n| step without failures, 2 groups | p50 |\n|---|---|")
    kinds = {
        "plain DDP over gloo": {"kind": "ddp"},
        "ftcore fast": {"kind": "ours", "mode": "fast"},
        "ftcore exact": {"kind": "ours", "mode": "exact"},
    }
    if peer:
        kinds["torchft"] = {"kind": "torchft", "heartbeat_ms": 100}
    for name, kind in kinds.items():
        print(f"| {name} | {step_times(kind, 2, steps) * 1e3:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()
