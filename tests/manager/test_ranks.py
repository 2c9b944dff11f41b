"""Replica groups of two ranks under torchrun: one rank is killed, its group is restarted, heals."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ftcore.demo.processes import Lighthouse

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("two_ranks.py")
HANG_S = 100.0


class Torchrun:
    """One replica group: when a rank dies torchrun ends, and whoever runs it starts it again."""

    def __init__(self, name, lighthouse, inner, gate):
        env = {**os.environ, "FTCORE_LIGHTHOUSE": lighthouse, "FTCORE_REPLICA_ID": name}
        env |= {"INNER": inner, "GATE": str(gate)}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--max-restarts", "0", "--standalone", str(SCRIPT)]
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

    def shas(self):
        assert self.process.wait(HANG_S) == 0
        return {line[1] for line in self.lines if line[:1] == ["SHA"]}


def weights(folder, *, inner, kill):
    folder.mkdir()
    with Lighthouse(folder, replicas_min=1 if kill else 2, log_level="ERROR") as lighthouse:
        arguments = (lighthouse.address, inner, folder / "gate")
        groups = [Torchrun(name, *arguments) for name in ("r0", "r1")]
        try:
            if kill:
                step = groups[1].wait(lambda line: line[0] == "STEP" and line[2] == "2")
                os.kill(int(step[3]), signal.SIGKILL)
                assert groups[1].process.wait(HANG_S) != 0
                groups[1] = Torchrun("r1", *arguments)
                groups[1].wait(lambda line: line[0] == "ATTACHED")
            (folder / "gate").touch()
            return set.union(*(group.shas() for group in groups))
        finally:
            for group in groups:
                group.process.kill()


@pytest.mark.parametrize("inner", ["ddp", "fsdp2", "tp", "pp"])
def test_a_rank_of_a_group_of_two_is_killed_and_the_bits_are_the_same(tmp_path, inner):
    failed = weights(tmp_path / "failed", inner=inner, kill=True)
    assert failed == weights(tmp_path / "unfailed", inner=inner, kill=False)
    assert len(failed) == (2 if inner == "pp" else 1)  # a rank of a pipeline has its own part
