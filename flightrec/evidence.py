"""Collects what lies beside the dumps: logs, RAS answers, stacks, exit codes; told by content."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from flightrec.errors import BadEvidence
from flightrec.exits import exits_from_logs, read_exits
from flightrec.logbook import LogBook
from flightrec.logs import looks_like_log, rank_from_name, read_logs
from flightrec.model import Evidence, Exit, RasState, Stack
from flightrec.ras import looks_like_ras, read_ras
from flightrec.stacks import looks_like_stack, read_stacks
from flightrec.unpacking import FILE_BYTES_MAX, Unpacked, is_packed, unpack

HEAD_BYTES = 256 << 10  # enough to see what a text is; training output may precede the first line
FILES_MAX = 200_000
FIRST_BYTES = 4096  # enough to tell JSON and pickles
LOG_SUFFIXES = {".log", ".txt", ".out", ".err"}
SUFFIXES = LOG_SUFFIXES | {"", ".json", ".stack", ".pyspy", ".ras"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file that is evidence of one kind: "log", "ras", "stack" or "exit"."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What was found beside the dumps, and in which files."""

    evidence: Evidence = field(default_factory=Evidence)
    book: LogBook = field(default_factory=lambda: LogBook(ranks={}))
    files: frozenset[str] = frozenset()

    @property
    def has_logs(self) -> bool:
        return bool(self.book.lines)


def collect(
    paths: Sequence[str],
    *,
    logs: Sequence[str] = (),
    ras: Sequence[str] = (),
    stacks: Sequence[str] = (),
    exits: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Beside:
    """Read all evidence: what is named for a purpose, and any text found under `paths`.

    Raises BadEvidence when a file that is named for a purpose cannot be read.
    """
    found: dict[str, TextFile] = {}
    with tempfile.TemporaryDirectory(prefix="flightrec-") as folder:
        for kind, named in (("log", logs), ("ras", ras), ("stack", stacks), ("exit", exits)):
            for one in _texts(named, Path(folder), must_exist=True):
                found[one.name] = TextFile(path=one.path, kind=kind)
        for one in _texts(paths, Path(folder)):
            told = _kind_of(one.path)
            if told:
                found.setdefault(one.name, TextFile(path=one.path, kind=told))
        return _read(dict(sorted(found.items())), tuple(notes))


def _texts(paths: Sequence[str], folder: Path, *, must_exist: bool = False) -> Iterator[Unpacked]:
    """Local files, and those in archives and object stores, which are laid into `folder`."""
    local = [path for path in paths if "://" not in path]
    for file in _files(local, must_exist=must_exist):
        if is_packed(file):
            yield from unpack(file, folder)
        else:
            yield Unpacked(file, file)
    for url in (path for path in paths if "://" in path):
        yield from unpack(url, folder)


def evidence_files(paths: Sequence[str]) -> list[TextFile]:
    """The text files under `paths` whose content is evidence."""
    kinds = {path: _kind_of(path) for path in _files(paths)}
    return [TextFile(path=path, kind=kind) for path, kind in kinds.items() if kind]


def _read(found: dict[str, TextFile], notes: tuple[str, ...]) -> Beside:
    def of(kind: str) -> list[tuple[str, str]]:
        return [(name, file.path) for name, file in found.items() if file.kind == kind]

    book = read_logs((name, lines_of_file(path)) for name, path in of("log"))
    pids = {log.pid: rank for rank, log in book.ranks.items() if log.pid is not None}
    stacks: list[Stack] = []
    for name, path in of("stack"):
        stacks += read_stacks(_text(path), source=name, pids=pids)
    ras: list[RasState] = []
    for name, path in of("ras"):
        ras += read_ras(_text(path), source=name)
    exits: list[Exit] = list(exits_from_logs(book))
    for name, path in of("exit"):
        exits += read_exits(_text(path), source=name)
    evidence = Evidence(
        exits=_one_each(exits),
        stacks=tuple(_once(stacks)),
        ras=tuple(_merged(ras)),
        notes=notes,
    )
    return Beside(evidence=evidence, book=book, files=frozenset(found))


def _once(stacks: Iterable[Stack]) -> Iterator[Stack]:
    """Each stack once: py-spy and the process itself may tell of the same one, with the functions
    named in two ways."""
    seen = set()
    for stack in sorted(set(stacks), key=lambda s: (s.rank, s.thread, str(s.frames))):
        lines = stack.rank, stack.thread, tuple((f.filename, f.line) for f in stack.frames)
        if lines not in seen:
            seen.add(lines)
            yield stack


def _one_each(exits: Iterable[Exit]) -> tuple[Exit, ...]:
    """One end per rank: what a launcher says of code and time, and the log of the error."""
    ends: dict[int, Exit] = {}
    for one in exits:
        before = ends.get(one.rank)
        ends[one.rank] = one if before is None else _both(before, one)
    return tuple(ends[rank] for rank in sorted(ends))


def _both(log: Exit, launcher: Exit) -> Exit:
    return replace(
        launcher,
        is_first_cause=log.is_first_cause or launcher.is_first_cause,
        error=launcher.error or log.error,
    )


def _merged(states: Iterable[RasState]) -> Iterator[RasState]:
    """The same rank may stand in a text and a JSON answer: keep the fuller of the two."""
    best: dict[tuple[str, int], RasState] = {}
    for state in states:
        key = state.communicator, state.rank
        if key not in best or _fullness(state) > _fullness(best[key]):
            best[key] = state
    yield from (best[key] for key in sorted(best))


def _fullness(state: RasState) -> tuple[int, int, int, str]:
    return state.is_dead, len(state.members), len(state.counts), state.error


def _files(paths: Sequence[str], *, must_exist: bool = False) -> Iterator[str]:
    """Local files under `paths`, sorted. Globs hold dumps only."""
    count = 0
    for given in paths:
        path = Path(given)
        if not path.exists():
            if must_exist:
                raise BadEvidence(f"{given} does not exist", path=given)
            continue
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for one in inside:
            if one.is_file() and (count := count + 1) <= FILES_MAX:
                yield str(one)


def _kind_of(path: str) -> str | None:
    """Tell a file by its content. Dumps, archives and anything binary are none of ours."""
    suffix = _suffix(path)
    if suffix not in SUFFIXES and not suffix[1:].isdigit():
        return None
    try:
        head = _head(path, FIRST_BYTES)
        if not head or "\x00" in head or head.startswith("\x80"):
            return None
        if looks_like_ras(head):
            return "ras"
        if head.lstrip()[:1] in "{[" and suffix not in LOG_SUFFIXES:
            return None  # a dump as JSON, or settings
        head = _head(path, HEAD_BYTES)
    except OSError:
        return None
    if looks_like_stack(head):
        return "stack"
    is_output = suffix in LOG_SUFFIXES and rank_from_name(path) is not None
    return "log" if is_output or looks_like_log(head) else None


def _suffix(path: str) -> str:
    name = Path(path.removesuffix(".gz"))
    return name.suffix


def _head(path: str, size: int) -> str:
    """The beginning of a file; of a pickle only its first byte, so that dumps cost nothing."""
    with _open(path) as file:
        first = file.read(1)
        return "\x80" if first == b"\x80" else (first + file.read(size)).decode(errors="replace")


def _open(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.endswith(".gz") else Path(path).open("rb")


def _text(path: str) -> str:
    return "".join(lines_of_file(path))


def lines_of_file(path: str) -> Iterator[str]:
    """The lines of a text file, unpacked if need be. Raises BadEvidence if it is far too large."""
    size = Path(path).stat().st_size
    if size > FILE_BYTES_MAX:
        raise BadEvidence(
            f"{path} has {size >> 20} MiB",
            remedy=f"Cut it to the lines around the failure (below {FILE_BYTES_MAX >> 20} MiB).",
            bytes=size,
        )
    with _open(path) as file:
        for line in file:
            yield line.decode(errors="replace")
