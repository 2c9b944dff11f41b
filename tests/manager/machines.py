"""Two machines, as two network namespaces with a cable between them; needs root."""

import os
import queue
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("two_ranks.py")
HANG_S = 100.0
LIGHTHOUSE = "10.77.0.1:29510"  # a port in a namespace of its own collides with nothing
_ports = count(29600)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def may_make_namespaces():
    try:
        ip("netns", "add", f"ftcore-probe-{os.getpid()}")
        ip("netns", "del", f"ftcore-probe-{os.getpid()}")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Machines:
    """Machine 0 has the address 10.77.0.1, machine 1 has 10.77.0.2."""

    def __init__(self):
        self.names = [f"ftcore-{os.getpid()}-{i}" for i in range(2)]
        self.processes = []

    def __enter__(self):
        for name in self.names:
            ip("netns", "add", name)
        ends = [f"ft{os.getpid() % 10**6}-{i}" for i in range(2)]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            ip("link", "set", end, "netns", name, "name", "cable")
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *exc):
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            ip("netns", "del", name)

    def pull_cable(self):
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def run(self, machine, *arguments, **env):
        command = ["ip", "netns", "exec", self.names[machine], sys.executable, *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def serve_lighthouse(self):
        process = self.run(
            0, "-m", "lighthouse", "serve", "--bind", LIGHTHOUSE, "--insecure", "--log-level=ERROR"
        )
        assert process.stdout.readline(), "the lighthouse did not start"

    def start_group(self, name, places):
        """One rank of two_ranks.py on each of `places`."""
        port = str(next(_ports))
        return [
            RemoteRank(
                self.run(
                    machine,
                    str(SCRIPT),
                    FTCORE_LIGHTHOUSE=LIGHTHOUSE,
                    FTCORE_REPLICA_ID=name,
                    FTCORE_HOST=f"10.77.0.{machine + 1}",
                    GLOO_SOCKET_IFNAME="cable",
                    LIMIT_S="5",  # a rank that waits for one behind the pulled cable
                    RANK=str(rank),
                    WORLD_SIZE=str(len(places)),
                    MASTER_ADDR=f"10.77.0.{places[0] + 1}",
                    MASTER_PORT=port,
                )
            )
            for rank, machine in enumerate(places)
        ]


class RemoteRank:
    def __init__(self, process):
        self.process = process
        self._lines = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.split())
        self._lines.put(["ENDED"])

    def wait(self, *words):
        """The next line that has these words."""
        while line := self._lines.get(timeout=HANG_S):
            if all(word in line for word in words):
                return line
            assert line != ["ENDED"], f"the rank ended before it said {words}"

    def sha(self):
        return self.wait("SHA")[1]

    def kill(self):
        self.process.kill()
