"""The README's loop, exactly as printed, under torchrun: one torchrun for each replica group."""

import os
import re
import subprocess
import sys
from pathlib import Path

from ftcore.demo.processes import Lighthouse

ROOT = Path(__file__).parents[2]
SHOW = """
from ftcore.demo.worker import sha256
print("SHA", sha256(model.parameters()))
"""


def readme_code(kind):
    text = (ROOT / "README.md").read_text()
    return re.search(rf"```python {kind}\n(.*?)```", text, re.S)[1]


def changed_lines():
    plain, wrapped = (readme_code(kind).splitlines() for kind in ("plain", "wrapped"))
    return [line for line in wrapped if line.strip() and line.strip() not in map(str.strip, plain)]


def torchrun(script, name, lighthouse):
    env = {**os.environ, "FTCORE_LIGHTHOUSE": lighthouse, "FTCORE_REPLICA_ID": name}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    command += ["--standalone", str(script)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_wrapping_takes_at_most_six_changed_lines():
    assert len(changed_lines()) <= 6, changed_lines()


def test_the_readme_loop_runs_under_torchrun_and_all_groups_agree(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(readme_code("wrapped") + SHOW)
    with Lighthouse(tmp_path, replicas_min=2, log_level="ERROR") as lighthouse:
        groups = [torchrun(script, name, lighthouse.address) for name in ("r0", "r1")]
        outputs = [group.communicate(timeout=240)[0] for group in groups]
    assert [group.returncode for group in groups] == [0, 0]
    shas = {line for output in outputs for line in output.splitlines() if line.startswith("SHA")}
    assert len(shas) == 1
