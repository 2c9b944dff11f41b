"""Run a test module as several processes of one group, and show what the first failure printed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_ranks(module, world, tmp_path, hang_s=120):
    command = [sys.executable, "-m", module]
    logs = [(tmp_path / f"rank{r}.log").open("w+") for r in range(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], cwd=ROOT, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=hang_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for log in logs:
        log.seek(0)
    failed = [log.read() for log, code in zip(logs, codes, strict=True) if code]
    assert not failed, "\n".join(failed)
