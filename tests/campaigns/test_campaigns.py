"""Short runs of the campaigns in tests/bench/ckpt: damage of every kind, kills at any moment."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.ckpt import corruption

ROOT = Path(__file__).parents[2]


def test_damage_of_every_kind_is_detected_and_the_step_before_loads(monkeypatch, tmp_path):
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "rt"))
    found = corruption.run(4 * len(corruption.DAMAGES), seed=1)
    assert {name: dict(outcomes) for name, outcomes in found.items()} == {
        name: {"detected": 4} for name in corruption.DAMAGES
    }


@pytest.mark.parametrize("seed", [1])
def test_after_a_kill_the_newest_committed_step_loads_whole(seed):
    """In a process of its own: trials fork, and this one may have threads."""
    command = [sys.executable, "-m", "tests.bench.ckpt.kills", "--trials", "10"]
    done = subprocess.run(
        [*command, "--seed", str(seed)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
