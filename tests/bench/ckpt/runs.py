"""Start measuring processes in the virtual environments of their peers, and end what they leave."""

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
from collections.abc import Sequence
from pathlib import Path

from tests.bench.ckpt.contestants import REQUIREMENTS

ROOT = Path(__file__).parents[3]
Figures = dict[str, object]


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


def run(
    commands: Sequence[Sequence[str]], directory: Path, *, timeout_s: float, python: str
) -> Figures | str:
    """The figures that one of these modules printed, or in a few words why there are none. Each
    module runs in a process of its own, with its place in the list as RANK."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    runtime = tempfile.mkdtemp(prefix="ckpt-bench-")
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CKPT_RUNTIME_DIR": runtime}
    if len(commands) > 1:
        ours["WORLD_SIZE"] = str(len(commands))
    workers = [
        subprocess.Popen(
            [python, "-m", *words],
            cwd=ROOT,
            env={**os.environ, **ours, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        for rank, words in enumerate(commands)
    ]
    try:
        for worker in workers:
            worker.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"not done in {timeout_s:g} s"
    finally:
        end_all(runtime)
        for worker in workers:
            worker.wait()
        shutil.rmtree(runtime, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
    log.seek(0)
    output = log.read()
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not found:
        lines = [line for line in output.strip().splitlines() if line.strip()]
        return f"failed: {lines[-1][:200] if lines else 'no output'}"
    result: Figures = json.loads(found[-1].removeprefix("RESULT "))
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
