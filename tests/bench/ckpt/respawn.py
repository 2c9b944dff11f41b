"""How soon a killed daemon is back: `python -m tests.bench.ckpt.respawn --kills 20`.

The daemon is killed after a durable save; measured is the time to the reconnection and to the next
save being durable, which is asked for at once. The state is small: it is the process that counts.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import click
import torch

from ckpt import Checkpointer


class Respawns(logging.Handler):
    """Notes when the checkpointer says that its daemon is there again."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "daemon.respawned":
            self.at.append(time.monotonic())


def measured(folder: Path, kills: int) -> tuple[list[float], list[float]]:
    """Seconds from each kill to the reconnection, and to the next durable save."""
    heard, back, durable = Respawns(), [], []
    logging.getLogger("ckpt").setLevel(logging.INFO)
    logging.getLogger("ckpt").addHandler(heard)
    state = {"w": torch.zeros(1 << 16)}
    with Checkpointer(folder / "run", keep_last=2) as checkpoints:
        checkpoints.save(state, step=0).wait_durable(60)
        for step in range(1, kills + 1):
            killed_at = time.monotonic()
            os.kill(int((folder / "daemon" / "daemon.lock").read_text()), signal.SIGKILL)
            checkpoints.save(state, step=step).wait_durable(60)
            durable.append(time.monotonic() - killed_at)
            back.append(heard.at[-1] - killed_at)
    return back, durable


@click.command()
@click.option("--kills", default=20, show_default=True)
def main(kills: int) -> None:
    with tempfile.TemporaryDirectory(prefix="ckpt-") as name:
        folder = Path(name)
        (folder / "daemon").mkdir(mode=0o700)
        os.environ["CKPT_RUNTIME_DIR"] = str(folder / "daemon")
        try:
            back, durable = measured(folder, kills)
        finally:
            os.kill(int((folder / "daemon" / "daemon.lock").read_text()), signal.SIGKILL)
    load = os.getloadavg()[0]
    click.echo(f"{kills} kills of the daemon, {os.cpu_count()} cores, load {load:.1f}")
    for what, seconds in (("daemon is back", back), ("next save durable", durable)):
        click.echo(f"{what}: median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
