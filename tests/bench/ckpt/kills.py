"""SIGKILL a saving trainer at random moments: `python -m tests.bench.ckpt.kills --trials 200`.

Each trial trains and saves step after step, now and then a step again, and is killed after a random
time: the trainer with everything, the trainer alone (its daemon lives on), or the daemon alone.
Then the newest committed step must load, be at least what was said to be durable, and be of one
save only; after the next start nothing may lie about that no manifest names.
"""

from __future__ import annotations

import collections
import logging
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

from ckpt import Checkpointer
from ckpt.errors import CheckpointError
from ckpt.listing import newest_first, read_manifest
from ckpt.stores import open_store
from ckpt.stores.errors import StoreError

WHAT = ("all", "all", "all", "trainer", "daemon")
TENSORS, ELEMENTS = 24, 60_000
STEPS_MAX = 400
SETTLE_S, HANG_S = 8.0, 60.0


def make_state() -> dict[str, object]:
    tensors: dict[str, object] = {f"t{i}": torch.zeros(ELEMENTS + i) for i in range(TENSORS)}
    tensors |= {f"s{i}": torch.zeros(i + 1) for i in range(50)}
    return {"model": tensors, "extra": {"number": 0}}


def fill(state: dict[str, object], number: int) -> None:
    """Every value of the state tells of which save it is."""
    model, extra = state["model"], state["extra"]
    assert isinstance(model, dict) and isinstance(extra, dict)
    for tensor in model.values():
        tensor.fill_(number)
    extra["number"] = number


def numbers(state: dict[str, object]) -> set[float]:
    """The saves of which a state has values: one, or it is a mixture."""
    model, extra = state["model"], state["extra"]
    assert isinstance(model, dict) and isinstance(extra, dict)
    found = {float(v) for t in model.values() for v in (t.min(), t.max())}
    return found | {float(extra["number"])}


def train(directory: Path, pipe: int, *, inline: bool, seed: int) -> None:
    """Save for ever; say on the pipe what was begun and what is durable."""
    rng, state, step = random.Random(seed), make_state(), 1
    checkpoints = Checkpointer(str(directory), keep_last=3, inline=inline)
    os.write(pipe, b"ready 0 0\n")
    for number in range(1, STEPS_MAX):
        fill(state, number)
        handle = checkpoints.save(state, step=step)
        handle.wait_staged()
        if rng.random() < 0.7:
            handle.wait_durable()
            os.write(pipe, f"durable {step} {number}\n".encode())
        step += rng.random() < 0.8  # else the same step again


@dataclass(frozen=True)
class Seen:
    """What the trainer had said before it died."""

    is_ready: bool = False
    durable_step: int = 0
    lines: int = 0


def listen(pipe: int, until_s: float, *, seen: Seen) -> Seen:
    """Read lines until the time has come or the trainer is gone."""
    rest = b""
    while (left := until_s - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        data = os.read(pipe, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            word, step, _ = line.decode().split()
            seen = replace(seen, is_ready=True, lines=seen.lines + 1)
            if word == "durable":
                seen = replace(seen, durable_step=max(seen.durable_step, int(step)))
        if seen.is_ready and lines[:1] == [b"ready 0 0"]:
            break
    return seen


def daemon_pid(runtime: Path) -> int | None:
    log = runtime / "daemon.log"
    if not log.exists():
        return None
    started = [line for line in log.read_text().splitlines() if "daemon.started" in line]
    return int(started[-1].split("pid=")[1].split()[0]) if started else None


def end(pid: int | None) -> None:
    try:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Trial:
    """One trainer, one kill, and the look at what is left."""

    def __init__(self, directory: Path, what: str, seed: int, *, window_s: float) -> None:
        self.directory, self.what, self.seed = directory / "run", what, seed
        self.runtime = Path(tempfile.mkdtemp(prefix="ckpt-kill-", dir="/tmp"))
        self.delay_s = random.Random(seed).uniform(0, window_s)
        os.environ["CKPT_RUNTIME_DIR"] = str(self.runtime)

    def run(self) -> str:
        """`ok`, or what is wrong."""
        try:
            return self._look(self._train_and_kill())
        finally:
            end(daemon_pid(self.runtime))
            shutil.rmtree(self.runtime, ignore_errors=True)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _train_and_kill(self) -> Seen:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            quiet()
            try:
                train(self.directory, writer, inline=self.what == "all", seed=self.seed)
            finally:
                os._exit(1)
        os.close(writer)
        try:
            seen = listen(reader, time.monotonic() + 60, seen=Seen())
            seen = listen(reader, time.monotonic() + self.delay_s, seen=seen)
            if self.what == "daemon":
                end(daemon_pid(self.runtime))
                seen = listen(reader, time.monotonic() + 3, seen=seen)  # it must go on saving
            end(pid)
            return listen(reader, time.monotonic() + 60, seen=seen)
        finally:
            os.waitpid(pid, 0)
            os.close(reader)

    def _look(self, seen: Seen) -> str:
        """In a fresh process, as after a restart."""
        pid = os.fork()
        if pid == 0:
            quiet()
            code = 1
            try:
                code = CODES.index(self._judge(seen))
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return CODES[code] if 0 <= code < len(CODES) else "crashed"

    def _judge(self, seen: Seen) -> str:
        if not seen.is_ready:
            return "the trainer never started"
        state = make_state()
        with Checkpointer(str(self.directory), keep_last=3, inline=self.what == "all") as again:
            newest = newest_first(open_store(str(self.directory)))[:1]
            step = again.restore(state) or 0
            if step < max([seen.durable_step, *newest]):
                return "a durable step is gone"
            if len(numbers(state)) != 1:
                return "the state is a mixture"
            again.save(state, step=step + 1).wait_durable(HANG_S)
        # A daemon that lived on may have been uploading until now: what it left counts from here.
        with Checkpointer(str(self.directory), keep_last=3, inline=self.what == "all") as again:
            again.save(state, step=step + 2).wait_durable(HANG_S)
            left = settled_junk(self.directory)
            if left:
                print(f"{self.what} {self.seed}: {left[:4]}", file=sys.stdout, flush=True)
            return "junk is left" if left else "ok"


CODES = ["ok", "crashed", "the trainer never started", "a durable step is gone"]
CODES += ["the state is a mixture", "junk is left"]


def settled_junk(directory: Path) -> list[str]:
    """What is left when retention, which deletes after a commit, has had its time."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        try:
            found = junk(directory)
        except (CheckpointError, StoreError):  # deleted while we looked
            found = ["?"]
        if not found or time.monotonic() > end_s:
            return found
        time.sleep(0.05)


def junk(directory: Path) -> list[str]:
    """Files in step directories that no manifest names, and unfinished ones anywhere."""
    store = open_store(str(directory))
    named = set()
    for step in newest_first(store):
        files = read_manifest(store, step).files
        named |= {f"step-{step:010d}/{f.key}" for f in files} | {f"step-{step:010d}/manifest.ckpt"}
    there = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    in_steps = {name for name in there if name.startswith("step-")}
    return sorted((in_steps - named) | {n for n in there if n.endswith(".partial")})


def quiet() -> None:
    logging.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())


def run(trials: int, *, seed: int, window_s: float = 1.0) -> dict[str, collections.Counter[str]]:
    """What became of each kind of kill."""
    torch.set_num_threads(1)
    found = {what: collections.Counter[str]() for what in dict.fromkeys(WHAT)}
    with tempfile.TemporaryDirectory(prefix="ckpt-kills-") as directory:
        for number in range(trials):
            what = WHAT[number % len(WHAT)]
            trial = Trial(Path(directory), what, seed * 1_000_000 + number, window_s=window_s)
            found[what][trial.run()] += 1
    return found


@click.command()
@click.option("--trials", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--window-s", default=1.0, show_default=True, help="Kills come within this time.")
def main(trials: int, seed: int, window_s: float) -> None:
    """Print what became of each kind of kill."""
    found = run(trials, seed=seed, window_s=window_s)
    click.echo("| SIGKILL of | trials | newest committed step loaded, of one save, no junk |")
    click.echo("|---|---|---|")
    for what, outcomes in found.items():
        click.echo(f"| {what} | {outcomes.total()} | {outcomes['ok']} |")
    bad = {w: dict(o) for w, o in found.items() if o.total() != o["ok"]}
    click.echo(f"\nWrong: {bad or 'nothing'}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
