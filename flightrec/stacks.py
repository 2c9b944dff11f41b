"""Reads Python stacks of hanging ranks: the text of py-spy, faulthandler and worker handlers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from flightrec.logs import rank_from_name
from flightrec.model import Frame, Stack

_PROCESS = re.compile(r"^Process (\d+):")
_RANK = re.compile(r"^[=\-#\s]*rank[ _:=]*(\d+)\b", re.IGNORECASE)
_PYSPY_THREAD = re.compile(r'^Thread (0x[0-9A-Fa-f]+|\d+) \(.*?\)(?:: "(.*)")?\s*$')
_FAULT_THREAD = re.compile(
    r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[(.*?)\])? \(most recent call first\):"
)
_PYSPY_FRAME = re.compile(r"^\s{2,}(\S.*?) \((.+?)(?::(\d+))?\)\s*$")
_FAULT_FRAME = re.compile(r'^\s+File "(.+?)", line (\d+) in (.+?)\s*$')


def looks_like_stack(text: str) -> bool:
    """Say whether `text` is what py-spy or faulthandler prints."""
    lines = text[:20_000].splitlines()
    return any(_PYSPY_THREAD.match(line) or _FAULT_THREAD.match(line) for line in lines)


def read_stacks(
    text: str, *, source: str = "", pids: Mapping[int, int] | None = None
) -> tuple[Stack, ...]:
    """Return the stacks of all threads in one text.

    A stack's rank is stated by a line `rank N` before it, by the file's name, or by `pids`
    (process id to rank). Stacks of unknown ranks are left out.
    """
    return tuple(_read(text, rank_from_name(source), pids or {}))


def _read(text: str, file_rank: int | None, pids: Mapping[int, int]) -> Iterator[Stack]:
    rank, thread, pid = file_rank, "", ""
    frames: list[Frame] = []
    for line in text.splitlines():
        if found := _PROCESS.match(line):
            pid = found[1]
        heading = _thread_of(line, pid)
        owner = _owner_of(line, pids)
        if heading is None and owner is None:
            if frame := _frame_of(line):
                frames.append(frame)
            continue
        yield from _stack(rank, thread, frames)
        frames = []
        rank = rank if owner is None else owner
        thread = heading if heading is not None else ""
    yield from _stack(rank, thread, frames)


def _stack(rank: int | None, thread: str, frames: list[Frame]) -> Iterator[Stack]:
    if rank is not None and frames:
        yield Stack(rank=rank, frames=tuple(frames), thread=thread or "MainThread")


def _owner_of(line: str, pids: Mapping[int, int]) -> int | None:
    if found := _PROCESS.match(line):
        return pids.get(int(found[1]))
    found = _RANK.match(line)
    return int(found[1]) if found else None


def _thread_of(line: str, pid: str) -> str | None:
    """The name of the thread that this line heads. Linux gives the main thread the process's id."""
    if found := _PYSPY_THREAD.match(line):
        return found[2] or ("MainThread" if found[1] == pid else "thread")
    if found := _FAULT_THREAD.match(line):
        return found[2] or ("MainThread" if found[1] == "Current thread" else "thread")
    return None


def _frame_of(line: str) -> Frame | None:
    if found := _FAULT_FRAME.match(line):
        return Frame(name=found[3], filename=found[1], line=int(found[2]))
    if found := _PYSPY_FRAME.match(line):
        return Frame(name=found[1], filename=found[2], line=int(found[3] or 0))
    return None
