"""Compare checkpointers on this machine: `python -m tests.bench.ckpt --cache DIR --work DIR`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import click

from tests.bench.ckpt.contestants import CONTESTANTS, REQUIREMENTS
from tests.bench.ckpt.tables import markdown

ROOT = Path(__file__).parents[3]


@click.command()
@click.option("--cache", type=Path, required=True, help="Keeps the peers' virtual environments.")
@click.option("--work", type=Path, required=True, help="An empty directory on the disk to measure.")
@click.option("--peers", default=",".join(CONTESTANTS), show_default=True)
@click.option("--sizes", default="big,small", show_default=True)
@click.option("--saves", default=3, show_default=True, help="Saves after the first.")
@click.option("--loops/--no-loops", default=True, help="Measure lost training time as well.")
@click.option("--timeout-s", default=240, show_default=True, help="Of one peer at one size.")
@click.option("--json", "output", type=Path, help="Also write the figures here.")
def main(
    cache: Path,
    work: Path,
    peers: str,
    sizes: str,
    saves: int,
    loops: bool,
    timeout_s: int,
    output: Path | None,
) -> None:
    """Print a Markdown table of all peers, beside the limits of the same minutes."""
    rows, failures = [], []
    for size in sizes.split(","):
        for name in peers.split(","):
            python = python_of(name, cache)
            if python is None:
                failures.append((name, size, "could not be installed"))
                continue
            words = [name, size, str(work / "run"), str(saves), "loops" if loops else "plain"]
            row = run_worker(python, words, timeout_s=timeout_s)
            (rows if isinstance(row, dict) else failures).append(
                row if isinstance(row, dict) else (name, size, row)
            )
            click.echo(f"{name} {size}: {row}", err=True)
            shutil.rmtree(work / "run", ignore_errors=True)
    click.echo(markdown(rows, failures))
    if output:
        output.write_text(json.dumps({"rows": rows, "failures": failures}, indent=1))


def python_of(name: str, cache: Path) -> str | None:
    """The Python that has the peer; None when it cannot be installed."""
    if name not in REQUIREMENTS:
        return sys.executable
    home = cache / name
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        site = next(home.glob("lib/python*/site-packages"))
        (site / "zz_parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        command = [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            shutil.rmtree(home)
            return None
    return str(python)


def run_worker(python: str, words: list[str], *, timeout_s: float) -> dict[str, object] | str:
    """The worker's figures, or in a few words why there are none."""
    shutil.rmtree(words[2], ignore_errors=True)
    Path(words[2]).mkdir(parents=True)
    worker = subprocess.Popen(
        [python, "-m", "tests.bench.ckpt.worker", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = worker.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"not done in {timeout_s:g} s"
    finally:
        end_session(worker)
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not found:
        lines = [line for line in output.strip().splitlines() if line.strip()]
        return f"failed: {lines[-1][:200] if lines else 'no output'}"
    result: dict[str, object] = json.loads(found[-1].removeprefix("RESULT "))
    return result


def end_session(worker: subprocess.Popen[str]) -> None:
    """Peers leave processes behind; all of them are in the worker's group."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.wait()


if __name__ == "__main__":
    main()
