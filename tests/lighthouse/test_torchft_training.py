"""torchft's own Manager trains against our lighthouse: join, kill, heal, restart, and a failover.

torchft's client knows one address. What a torchft user has in front of several lighthouses is one
name that leads to one that lives (a Kubernetes Service, a virtual address): `Address` is that here.
"""

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lighthouse.lighthouse_process import LighthouseProcess

pytest.importorskip("torchft")
ROOT = Path(__file__).parents[2]
OPTIONS = ("--torchft-heartbeat-timeout", "2", "--min-replicas", "1", "--torchft-join-timeout", "2")


class Address:
    """One TCP address that leads to the first lighthouse that accepts."""

    def __init__(self, targets):
        self._targets = targets
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return  # closed
            for target in self._targets:
                host, port = target.split(":")
                try:
                    server = socket.create_connection((host, int(port)), timeout=1)
                except OSError:
                    continue
                server.settimeout(None)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=(one, other), daemon=True).start()
                break
            else:
                client.close()

    def stop(self):
        self._server.close()


def _pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class Trainer:
    def __init__(self, replica_id, lighthouse, steps=100_000):
        command = [sys.executable, "-m", "tests.lighthouse.torchft_trainer", replica_id, lighthouse]
        self.process = subprocess.Popen(
            [*command, str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self.lines = []

    def until(self, condition):
        """Read its lines until one of them fulfils `condition`."""
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if condition(self.lines[-1]):
                return self.lines[-1]
        raise AssertionError(f"it ended ({self.process.wait()}) after {self.lines[-3:]}")

    def with_groups(self, count):
        return self.until(lambda line: line["groups"] == count)

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def world(count=1, *options):
    """`start(name)` starts a trainer on the one address of `count` lighthouses."""
    things = [LighthouseProcess(*OPTIONS, *options) for _ in range(count)]
    lighthouses, front = list(things), Address([p.address for p in things])
    things.append(front)

    def start(name, **more):
        things.append(Trainer(name, front.address, **more))
        return things[-1]

    try:
        yield lighthouses, start
    finally:
        for thing in reversed(things):
            thing.stop()


def same_state(one, other):
    """Whether both have had one state at one step."""
    states = {line["step"]: line["state"] for line in one.lines}
    return any(states.get(line["step"]) == line["state"] for line in other.lines)


@pytest.mark.timeout(240)
def test_torchfts_manager_joins_is_killed_heals_and_goes_on():
    with world() as (_, start):
        a, b = start("a"), start("b")
        a.with_groups(2), b.with_groups(2)
        b.process.kill()
        step = a.with_groups(1)["step"]
        again = start("b")
        healed = again.with_groups(2)
        assert healed["step"] >= step, "it began anew instead of healing"
        a.until(lambda line: line["step"] >= healed["step"] + 5)
        again.until(lambda line: line["step"] >= healed["step"] + 5)
        assert same_state(a, again)


@pytest.mark.timeout(240)
def test_the_leader_of_two_lighthouses_is_killed_and_torchfts_training_goes_on(tmp_path):
    with world(2, "--lease", f"file:{tmp_path / 'lease'}") as (lighthouses, start):
        leader = next(p for p in lighthouses if p.status()["role"] == "leader")
        a, b = start("a"), start("b")
        step = max(a.with_groups(2)["step"], b.with_groups(2)["step"])
        leader.signal(signal.SIGKILL)
        for trainer in (a, b):
            trainer.until(lambda line: line["groups"] == 2 and line["step"] > step + 20)
        steps = [line["step"] for line in a.lines if line["step"] > step]
        assert steps == sorted(steps) and same_state(a, b)
