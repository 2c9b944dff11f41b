"""Replica groups of two ranks under torchrun: one rank is killed, its group is restarted, heals."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ftcore.demo.processes import Lighthouse

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("two_ranks.py")
HANG_S = 100.0


class Torchrun:
    """One replica group. When a rank dies, torchrun restarts its ranks, or ends when it may not."""

    def __init__(self, name, lighthouse, *, gate, inner="ddp", restarts=0):
        env = {**os.environ, "FTCORE_LIGHTHOUSE": lighthouse, "FTCORE_REPLICA_ID": name}
        env |= {"INNER": inner, "GATE": str(gate)}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # without this gloo's own set-up hangs or fails at most restarts in place, torch 2.13
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(restarts), "--standalone", str(SCRIPT)]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self.lines = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.split())

    def wait(self, condition):
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            found = [line for line in list(self.lines) if line and condition(line)]
            if found:
                return found[-1]
            time.sleep(0.02)
        raise AssertionError(f"never seen; the last lines were {self.lines[-3:]}")

    def end(self):
        """Kill torchrun, and its ranks, which would outlive it."""
        pid = self.process.pid
        with suppress(OSError):
            ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self.process.kill()
            for rank in ranks:
                os.kill(int(rank), signal.SIGKILL)

    def shas(self):
        assert self.process.wait(HANG_S) == 0
        return {line[1] for line in self.lines if line[:1] == ["SHA"]}


@contextmanager
def two_groups(folder, *, replicas_min=1, **options):
    with Lighthouse(folder, replicas_min=replicas_min, log_level="ERROR") as lighthouse:

        def start(name):
            groups.append(Torchrun(name, lighthouse.address, gate=folder / "gate", **options))
            return groups[-1]

        groups = []
        try:
            yield start, start("r0"), start("r1")
        finally:
            for group in groups:
                group.end()


def unfailed(folder, *, inner="ddp"):
    """The weights of all ranks of a run of two groups in which nothing fails."""
    with two_groups(folder, replicas_min=2, inner=inner) as (_, *groups):
        go_on(folder)
        return set.union(*(group.shas() for group in groups))


def go_on(folder):
    """Whoever holds in the middle of the run goes on."""
    (folder / "gate").touch()


def kill_a_rank(group):
    step = group.wait(lambda line: line[0] == "STEP" and line[2] == "2")
    os.kill(int(step[3]), signal.SIGKILL)


@pytest.mark.parametrize("inner", ["ddp", "fsdp2", "tp", "pp"])
def test_a_rank_is_killed_its_group_started_anew_and_the_bits_are_the_same(tmp_path, inner):
    with two_groups(tmp_path, inner=inner) as (start, r0, r1):
        kill_a_rank(r1)
        assert r1.process.wait(HANG_S) != 0
        again = start("r1")
        again.wait(lambda line: line[0] == "ATTACHED")
        go_on(tmp_path)
        found = r0.shas() | again.shas()
    assert found == unfailed(tmp_path, inner=inner)
    assert len(found) == (2 if inner == "pp" else 1)  # a rank of a pipeline has its own part


def test_a_rank_is_killed_torchrun_restarts_its_group_and_the_bits_are_the_same(tmp_path):
    with two_groups(tmp_path, restarts=1) as (_, r0, r1):
        kill_a_rank(r1)
        r1.wait(lambda line: line == ["ATTACHED", "1"])
        go_on(tmp_path)
        assert r0.shas() | r1.shas() == unfailed(tmp_path)
