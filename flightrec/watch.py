"""Looks at a job that runs or hangs: makes every rank dump, collects dumps and stacks, decides.

A rank listens on the named pipe `PREFIX<rank>.pipe` (NCCL's own, or flightrec's DumpOnRequest) and
writes its dump to `PREFIX<rank>`. Only what was written after the request counts. A rank whose
pipe nobody reads is gone; one that does not answer in time is missing. Both are evidence.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from flightrec.cli import Case, examine
from flightrec.errors import NoPipes
from flightrec.evidence import Beside, collect
from flightrec.model import Exit
from flightrec.ras import query_ras
from ftcore.base.errors import BadSetting

POLL_S = 0.1
PYSPY_TIMEOUT_S = 20.0
GONE = "no process answers requests for its dump any more"
_PIPE_RANK = re.compile(r"(\d+)\.pipe$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One rank that may be asked to dump."""

    rank: int
    pipe: str
    dump: str  # where its dump appears


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of asking one rank."""

    rank: int
    is_gone: bool = False
    seconds: float | None = None  # from the request to the complete dump; None: none came


def find_listeners(pipes: str, dumps: str | None = None) -> tuple[Listener, ...]:
    """The ranks that listen at `PREFIX<rank>.pipe`. Raises NoPipes when there is none."""
    found = {}
    for pipe in glob.glob(glob.escape(pipes) + "*.pipe"):
        if match := _PIPE_RANK.search(pipe):
            found[int(match[1])] = pipe
    if not found:
        raise NoPipes(f"no pipe is named {pipes}<rank>.pipe", prefix=pipes)
    prefix = pipes if dumps is None else dumps
    return tuple(
        Listener(rank=rank, pipe=found[rank], dump=f"{prefix}{rank}") for rank in sorted(found)
    )


def watch(
    listeners: Sequence[Listener],
    *,
    out: str | None = None,
    wait_s: float = 15.0,
    pids: Mapping[int, int] | None = None,
    ras: tuple[str, int] | None = None,
    notes: Sequence[str] = (),
) -> Case:
    """Make all listeners dump, collect what comes within `wait_s`, and decide.

    `out` keeps the collected files (default: a temporary folder that is removed). `pids` of local
    ranks are found by their open pipes when not given; their stacks are taken with py-spy where it
    is installed. `ras` asks NCCL's RAS service too. Blocks; safe to run in a thread, for it makes
    no collective. Raises NoPipes when all ranks are gone, NoDumps when none answered.
    """
    with _folder(out) as folder:
        answers = ask(listeners, wait_s=wait_s)
        if all(answer.is_gone for answer in answers):
            raise NoPipes(
                f"nobody reads the {len(answers)} pipes any more: the job has ended",
                remedy="Analyze what it left behind: `flightrec analyze` on its dumps and logs.",
            )
        _keep(listeners, answers, folder)
        return look_into(
            folder,
            pids={**find_pids(listeners), **(pids or {})},
            gone=[answer.rank for answer in answers if answer.is_gone],
            ras=ras,
            notes=notes,
        )


def look_into(
    folder: Path,
    *,
    pids: Mapping[int, int] | None = None,
    gone: Sequence[int] = (),
    ras: tuple[str, int] | None = None,
    notes: Sequence[str] = (),
) -> Case:
    """Decide from the dumps and stacks that were collected in `folder`, after adding what py-spy
    says of the local processes `pids` (by rank), where it is installed, and NCCL's RAS service.

    gone: ranks of which it is known that they live no more. Raises NoDumps when there is none.
    """
    take_stacks(pids or {}, folder)
    if ras is not None:
        _take_ras(*ras, folder)
    return examine([str(folder)], _with_gone(collect([str(folder)], notes=notes), gone))


class _folder:
    """The folder that collects the files: the user's own, or one that goes away again."""

    def __init__(self, out: str | None) -> None:
        self._out = out
        self._path = Path()

    def __enter__(self) -> Path:
        self._path = Path(self._out or tempfile.mkdtemp(prefix="flightrec-"))
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path

    def __exit__(self, *_: object) -> None:
        if self._out is None:
            shutil.rmtree(self._path, ignore_errors=True)


def ask(listeners: Sequence[Listener], *, wait_s: float) -> tuple[Answer, ...]:
    """Write a byte to every pipe and wait for the dumps. Never blocks longer than `wait_s`."""
    before = {one.rank: _stamp(one.dump) for one in listeners}
    began = time.monotonic()
    gone = {one.rank for one in listeners if not _request(one.pipe)}
    seconds: dict[int, float] = {}
    waiting = [one for one in listeners if one.rank not in gone]
    while waiting and time.monotonic() - began < wait_s:
        time.sleep(POLL_S)
        for one in list(waiting):
            if _stamp(one.dump) != before[one.rank] and _is_complete(one.dump):
                seconds[one.rank] = time.monotonic() - began
                waiting.remove(one)
    return tuple(
        Answer(rank=one.rank, is_gone=one.rank in gone, seconds=seconds.get(one.rank))
        for one in listeners
    )


def _request(pipe: str) -> bool:
    """Write one byte; return False when no process has the pipe open."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        return error.errno not in (errno.ENXIO, errno.ENOENT)
    try:
        os.write(fd, b"1")
    except BlockingIOError:
        pass  # the pipe is full of requests, so one is pending anyway
    finally:
        os.close(fd)
    return True


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _is_complete(path: str) -> bool:
    """A pickle ends with its STOP instruction, JSON with a bracket; torch writes in place."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) in (b".", b"}", b"]")
    except OSError:
        return False


def _keep(listeners: Sequence[Listener], answers: Sequence[Answer], folder: Path) -> None:
    """Copy the fresh dumps and stacks, so that a later request does not overwrite them. What an
    earlier look left of these ranks goes, or it would pass for an answer."""
    for one, answer in zip(listeners, answers, strict=True):
        for old in (f"rank_{one.rank}", f"rank_{one.rank}.stack", f"rank_{one.rank}.pyspy.txt"):
            (folder / old).unlink(missing_ok=True)
        if answer.seconds is None:
            continue
        shutil.copy2(one.dump, folder / f"rank_{one.rank}")
        if os.path.exists(one.dump + ".stack"):
            shutil.copy2(one.dump + ".stack", folder / f"rank_{one.rank}.stack")


def find_pids(listeners: Sequence[Listener]) -> dict[int, int]:
    """The local process of each rank: the one that holds its pipe open (Linux)."""
    wanted = {os.path.realpath(one.pipe): one.rank for one in listeners}
    found: dict[int, int] = {}
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target in wanted and (pid := int(link.split("/")[2])) != os.getpid():
            found.setdefault(wanted[target], pid)
    return found


def take_stacks(pids: Mapping[int, int], folder: Path) -> list[int]:
    """Write py-spy's stack of each process into `folder`; return the ranks that it worked for."""
    pyspy = shutil.which("py-spy")
    if pyspy is None or not pids:
        return []
    with ThreadPoolExecutor(max_workers=8) as pool:
        texts = pool.map(lambda rank: _pyspy(pyspy, pids[rank]), sorted(pids))
        done = []
        for rank, text in zip(sorted(pids), texts, strict=True):
            if text:
                (folder / f"rank_{rank}.pyspy.txt").write_text(text)
                done.append(rank)
    return done


def _pyspy(pyspy: str, pid: int) -> str:
    command = [pyspy, "dump", "--pid", str(pid), "--full-filenames"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PYSPY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def _take_ras(host: str, port: int, folder: Path) -> None:
    try:
        (folder / "ras.txt").write_text(query_ras(host, port))
    except OSError:
        return  # no RAS: NCCL before 2.24, switched off, or another host


def _with_gone(beside: Beside, gone: Sequence[int]) -> Beside:
    ends = tuple(Exit(rank=rank, error=GONE, is_first_cause=True) for rank in gone)
    others = tuple(one for one in beside.evidence.exits if one.rank not in gone)
    exits = tuple(sorted(others + ends, key=lambda one: one.rank))
    return replace(beside, evidence=replace(beside.evidence, exits=exits))


def until_fault(
    look: Callable[[], Case],
    *,
    every_s: float,
    sleep: Callable[[float], None],
    looks_max: int | None = None,
) -> Case:
    """Look again and again until two looks in a row see the same ranks hang in the same call.

    One look cannot tell slow from stuck. A fault that does not hang (a straggler, a silent
    mismatch) is returned at once, and after `looks_max` looks the last one.
    """
    before: frozenset[object] = frozenset()
    for count in itertools.count(1):
        case = look()
        culprits = case.report.culprits
        seen = frozenset((c.rank, c.kind, c.group, c.seq) for c in culprits)
        is_sure = seen and (seen == before or not all(c.is_hanging for c in culprits))
        if is_sure or count == looks_max:
            return case
        before = seen
        sleep(every_s)
    raise AssertionError("itertools.count ended")


def look_at(
    pipes: str,
    dumps: str | None,
    *,
    out: str | None,
    wait_s: float,
    ras: str | None,
    notes: Sequence[str],
    every_s: float | None,
    looks_max: int | None = None,
) -> Case:
    """What the command does: one look, or looks until two agree on a hang."""
    address = _address(ras) if ras else None

    def look() -> Case:
        listeners = find_listeners(pipes, dumps)
        return watch(listeners, out=out, wait_s=wait_s, ras=address, notes=notes)

    if every_s is None:
        return look()
    return until_fault(look, every_s=every_s, sleep=time.sleep, looks_max=looks_max)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit():
        raise BadSetting(f"--ras {text} is not HOST:PORT", ras=text)
    return host or "localhost", int(port)
