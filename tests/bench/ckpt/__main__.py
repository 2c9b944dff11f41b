"""Compare checkpointers on this machine: `python -m tests.bench.ckpt --cache DIR --work DIR`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
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
    runtime = tempfile.mkdtemp(prefix="ckpt-bench-")
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CKPT_RUNTIME_DIR": runtime}
    worker = subprocess.Popen(
        [python, "-m", "tests.bench.ckpt.worker", *words],
        cwd=ROOT,
        env={**os.environ, **ours},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        worker.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"not done in {timeout_s:g} s"
    finally:
        end_all(runtime)
        worker.wait()
        shutil.rmtree(runtime, ignore_errors=True)
    log.seek(0)
    output = log.read()
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not found:
        lines = [line for line in output.strip().splitlines() if line.strip()]
        return f"failed: {lines[-1][:200] if lines else 'no output'}"
    result: dict[str, object] = json.loads(found[-1].removeprefix("RESULT "))
    return result


def end_all(runtime: str) -> None:
    """Peers and daemons leave processes behind: end those with our mark in their environment."""
    mark = f"CKPT_RUNTIME_DIR={runtime}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue


if __name__ == "__main__":
    main()
