"""The systems that are measured, as real processes: a lighthouse and its training groups."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ftcore.demo.processes import Lighthouse

ROOT = Path(__file__).parents[3]
TRAINER = Path(__file__).with_name("trainer.py")
HANG_S = 120.0


class OurLighthouse:
    """`lighthouse serve` with a journal; it comes back at its old address."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._start(port=0)

    def _start(self, port):
        folder = Path(self._folder.name)
        self._running = Lighthouse(folder, replicas_min=1, log_level="ERROR", port=port)
        self.address = self._running.address

    def kill(self):
        self._running.kill()

    def restart(self):
        self._start(int(self.address.rpartition(":")[2]))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.kill()
        self._folder.cleanup()


class PeerLighthouse:
    def __init__(self, *options):
        self.address = f"127.0.0.1:{free_port()}"
        self._options = options
        self.restart()

    def kill(self):
        self._process.kill()
        self._process.wait()

    def restart(self):
        command = ["torchft_lighthouse", "--bind", self.address, "--min_replicas", "1"]
        env = {**os.environ, "RUST_LOG": "off"}
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*command, *self._options], stdout=quiet, stderr=quiet, env=env
        )
        wait_port(self.address)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.kill()


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
    """One group; each line it prints is a commit: step, wall time, samples lost so far."""

    def __init__(self, config):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RUST_LOG": "off"}
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.lost = 0

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)

    def report(self):
        return json.loads(self._lines.get(timeout=HANG_S))

    def commit(self, timeout_s=HANG_S):
        """Wall time of the next commit, or None when there is none in time."""
        try:
            _, at, lost = self._lines.get(timeout=timeout_s).split()
        except queue.Empty:
            return None
        self.lost = int(lost)
        return float(at)

    def commits_so_far(self):
        """Wall times of all commits that were not asked for yet."""
        found = []
        while not self._lines.empty():
            found.append(self.commit())
        return found

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


SYSTEMS = {
    "ftcore, defaults": ({"kind": "ours", "mode": "fast"}, OurLighthouse),
    "torchft, defaults": ({"kind": "torchft", "heartbeat_ms": 100}, PeerLighthouse),
    "torchft, best tuned": (
        {"kind": "torchft", "heartbeat_ms": 50},
        lambda: PeerLighthouse("--heartbeat_timeout_ms", "200", "--quorum_tick_ms", "10"),
    ),
}
