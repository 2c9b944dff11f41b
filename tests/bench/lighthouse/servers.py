"""The two servers side by side, each in a process of its own, with its CPU time and memory."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[3]
TORCHFT = """
import json, sys, time
from datetime import timedelta
from torchft._torchft import LighthouseServer
server = LighthouseServer("127.0.0.1:0", int(sys.argv[1]), 60_000, 100, 5_000)
print(json.dumps({"address": server.address().removeprefix("http://")}), flush=True)
time.sleep(1e6)
"""


class Server:
    def __init__(self, command, env=None):
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.address = json.loads(self.process.stdout.readline())["address"]
        port = self.address.rpartition(":")[2]
        self.address = f"127.0.0.1:{port}"

    def cpu_s(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self):
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")


@contextmanager
def torchft(replicas_min):
    """torchft's own lighthouse (Rust), log off: that is its fastest."""
    with _running(
        [sys.executable, "-c", TORCHFT, str(replicas_min)], {"RUST_LOG": "off"}
    ) as server:
        yield server


@contextmanager
def ours(replicas_min, **options):
    command = [sys.executable, "-m", "lighthouse", "serve", "--bind", "127.0.0.1:0"]
    command += ["--min-replicas", str(replicas_min), "--log-level", "ERROR"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with TemporaryDirectory() as home, _running([*command, "--journal", f"{home}/j"]) as server:
        yield server


@contextmanager
def _running(command, env=None):
    server = Server(command, env)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.process.stdout.close()
