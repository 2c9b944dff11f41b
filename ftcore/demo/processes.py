"""Run a lighthouse and replica groups as real processes, and kill and restart groups."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ftcore.base.errors import FtError
from ftcore.demo.timeline import Event


class DemoFailed(FtError):
    remedy = "Look at the lines above; run it again with --log-level DEBUG for all events."


class Lighthouse:
    """`lighthouse serve` on this machine, with its journal in `folder`. Port 0 is a free one."""

    def __init__(self, folder: Path, *, replicas_min: int, log_level: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "lighthouse", "serve", "--bind", f"127.0.0.1:{port}"]
        command += ["--http", "127.0.0.1:0", "--journal", str(folder / "lighthouse.journal")]
        command += ["--min-replicas", str(replicas_min), "--log-level", log_level]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DemoFailed("the lighthouse did not start")
        self.address = str(json.loads(line)["address"])

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Lighthouse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)


@dataclass
class Group:
    """One replica group over all its lives."""

    name: str
    config: Mapping[str, object]
    inbox: queue.SimpleQueue[tuple[str, Event]]
    log_level: str = "ERROR"
    events: list[Event] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    sha: str = ""

    def start(self) -> None:
        argument = json.dumps({**self.config, "replica_id": self.name})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftcore.demo.worker", argument],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FTCORE_LOG_LEVEL": self.log_level}
            | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what deterministic algorithms need on CUDA
            | {"CKPT_RUNTIME_DIR": str(self.config.get("daemon_folder", ""))},
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self.inbox.put((self.name, json.loads(line)))
            except ValueError:
                pass  # the last line of a killed process may be cut off
        ended: Event = {"event": "ended", "at": time.time(), "code": process.wait()}
        self.inbox.put((self.name, ended))

    def kill(self) -> float:
        """Send SIGKILL and return when."""
        assert self.process is not None
        at = time.time()
        self.process.send_signal(signal.SIGKILL)
        return at

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


ALL = "all"


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill `group` when it is in the middle of `step`; `ALL` groups when the first of them is."""

    group: str
    step: int

    def hits(self, name: str) -> bool:
        return self.group in (name, ALL)


@dataclass
class Killed:
    kill: Kill
    killed_at: float
    restarted_at: float | None = None


def kill_checkpoint_daemon(folder: Path) -> None:
    """Send SIGKILL, if there is one: as if its host were lost."""
    lock = folder / "daemon.lock"
    pid = int(lock.read_text() or 0) if lock.exists() else 0
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def checkpoint_folder() -> Iterator[Path]:
    """Where a run keeps its checkpoints, and what the checkpointer's daemon needs."""
    with tempfile.TemporaryDirectory(prefix="ftcore-ckpt-") as name:
        folder = Path(name)
        (folder / "daemon").mkdir(mode=0o700)
        try:
            yield folder
        finally:
            kill_checkpoint_daemon(folder / "daemon")


@dataclass
class Run:
    """One whole job, with the kills that were asked for."""

    groups: dict[str, Group]
    killed: list[Killed] = field(default_factory=list)
    seconds: float = 0.0

    def hit_by(self, kill: Kill) -> list[Group]:
        return [group for group in self.groups.values() if kill.hits(group.name)]

    def kill(self, kill: Kill) -> Killed:
        """Send SIGKILL to all that `kill` hits; with all groups also to the checkpoint daemon, so
        that nothing is left but what is on disk."""
        killed = Killed(kill, min([group.kill() for group in self.hit_by(kill)]))
        folder = next(iter(self.groups.values())).config.get("daemon_folder")
        if kill.group == ALL and folder:
            kill_checkpoint_daemon(Path(str(folder)))
        self.killed.append(killed)
        return killed

    @property
    def losses(self) -> dict[int, float]:
        """Step to loss, as the last group that committed it saw it."""
        found: dict[int, float] = {}
        for group in self.groups.values():
            for event in group.events:
                if event["event"] == "step.committed":
                    found[int(str(event["step"]))] = float(str(event["loss"]))
        return found


def run_job(
    config: Mapping[str, object],
    names: list[str],
    *,
    kills: list[Kill],
    restart_after_s: float,
    seen: Callable[[str, Event], None],
    timeout_s: float,
    log_level: str = "ERROR",
) -> Run:
    """Run all groups to the end. `seen(group, event)` is called for every event as it comes."""
    inbox: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
    run = Run({name: Group(name, config, inbox, log_level) for name in names})
    began = time.monotonic()
    try:
        for group in run.groups.values():
            group.start()
        _drive(run, inbox, list(kills), restart_after_s, seen, began + timeout_s)
    finally:
        for group in run.groups.values():
            group.end()
    run.seconds = time.monotonic() - began
    return run


def _check_not_too_late(run: Run) -> None:
    """A restarted group can only heal while others still train."""
    missing = [name for name, group in run.groups.items() if not group.sha]
    killed = [k for k in run.killed if k.kill.group != ALL]
    returning = {k.kill.group for k in killed if k.restarted_at is None or not _is_in(run, k)}
    if len(missing) < len(run.groups) and set(missing) <= returning:
        raise DemoFailed(
            f"the others had finished before {', '.join(missing)} was back",
            remedy="Use more --steps, a longer --step-time or a shorter --restart-after.",
        )


def _is_in(run: Run, killed: Killed) -> bool:
    """Whether the group has committed a step since its restart."""
    restarted_at = killed.restarted_at or 0.0
    events = reversed(run.groups[killed.kill.group].events)
    return any(
        e["event"] == "step.committed" and float(str(e["at"])) > restarted_at for e in events
    )


def _drive(
    run: Run,
    inbox: queue.SimpleQueue[tuple[str, Event]],
    kills: list[Kill],
    restart_after_s: float,
    seen: Callable[[str, Event], None],
    deadline: float,
) -> None:
    restarts: list[tuple[float, Killed]] = []
    while not all(group.sha for group in run.groups.values()):
        if time.monotonic() > deadline:
            raise DemoFailed("the job did not end in time")
        _check_not_too_late(run)
        for due in [r for r in restarts if r[0] <= time.monotonic()]:
            restarts.remove(due)
            due[1].restarted_at = time.time()
            for group in run.hit_by(due[1].kill):
                group.start()
        try:
            name, event = inbox.get(timeout=0.05)
        except queue.Empty:
            continue
        group = run.groups[name]
        group.events.append(event)
        seen(name, event)
        match event["event"]:
            case "shard":
                step = int(str(event["step"]))
                for kill in [k for k in kills if k.step == step and k.hits(name)]:
                    kills.remove(kill)
                    killed = run.kill(kill)
                    restarts.append((time.monotonic() + restart_after_s, killed))
            case "finished":
                group.sha = str(event["sha"])
            case "error":
                raise DemoFailed(f"{name}: {event['what']}", remedy=str(event["remedy"]))
            case "ended" if event["code"] not in (0, -signal.SIGKILL):
                raise DemoFailed(f"{name} ended with exit code {event['code']}")
