"""Find dump files: folders, globs, archives, URLs, quorum folders; and read the bytes of one."""

from __future__ import annotations

import glob
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flightrec.errors import BadDump, NoDumps

BYTES_MAX = 1 << 30  # of one dump, decompressed; 2 M entries with stacks are about 300 MB
_QUORUM = re.compile(r"_quorum_(-?\d+)")
_RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|gz|bin))*$")
TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_IGNORED = re.compile(r"(^|/)(\.|__pycache__|truth\.json$)|\.(log|txt|md|py|html|csv)(\.gz)?$")


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """One file that may be a dump."""

    path: str
    member: str = ""  # inside an archive
    is_named: bool = False  # the user named this very file, so it must be a dump
    bytes_estimate: int = 0

    def __str__(self) -> str:
        return f"{self.path}!{self.member}" if self.member else self.path

    @property
    def quorum(self) -> int | None:
        found = _QUORUM.findall(str(self))
        return int(found[-1]) if found else None

    @property
    def rank(self) -> int | None:
        """The rank that the name tells: `…rank_3`, `host.pci1_rank_3.json`, `_dump_3`, `3`."""
        name = (self.member or self.path).rsplit("/", 1)[-1]
        found = _RANK.findall(name)
        if found:
            return int(found[-1])
        match = _NUMBER.search(name)
        return int(match[1]) if match else None


def find_sources(paths: Sequence[str]) -> list[Source]:
    """Every file that the paths lead to, sorted. Raises NoDumps when a path leads nowhere."""
    found = {source for path in paths for source in _expand(str(path))}
    return sorted(found)


def _expand(path: str) -> Iterator[Source]:
    if "://" in path and not path.startswith("file://"):
        yield from _expand_url(path)
        return
    path = path.removeprefix("file://")
    if os.path.isdir(path):
        yield from _walk(path)
    elif os.path.exists(path):
        yield from _file(path, is_named=True)
    elif matches := sorted(glob.glob(path, recursive=True)):
        for match in matches:
            yield from _walk(match) if os.path.isdir(match) else _file(match, is_named=False)
    else:
        raise NoDumps(f"{path} does not exist", path=path)


def _walk(folder: str) -> Iterator[Source]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(parent, name)
            if os.path.isfile(full) and not _IGNORED.search(os.path.relpath(full, folder)):
                yield from _file(full, is_named=False)


def _file(path: str, *, is_named: bool) -> Iterator[Source]:
    size = os.path.getsize(path)
    if path.endswith(TAR):
        with archive_errors(path), tarfile.open(path) as archive:
            for info in archive:
                if info.isfile() and not _IGNORED.search(info.name):
                    yield Source(path, info.name, False, info.size)
    elif path.endswith(".zip"):
        with archive_errors(path), zipfile.ZipFile(path) as archive_zip:
            for entry in archive_zip.infolist():
                if not entry.is_dir() and not _IGNORED.search(entry.filename):
                    yield Source(path, entry.filename, False, entry.file_size)
    else:
        yield Source(path, "", is_named, size)


class archive_errors:
    """An archive that cannot be opened is named, whatever is wrong with it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(
            error, tarfile.TarError | zipfile.BadZipFile | EOFError | OSError | zlib.error
        ):
            raise NoDumps(f"the archive {self.path} cannot be read: {error}") from error


def store_files(url: str) -> tuple[Any, list[str]]:
    """The file system of a URL and the names of all files under it. Raises NoDumps."""
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
        names = filesystem.glob(path) if glob.has_magic(path) else [path]
        found = [f for n in names for f in (filesystem.find(n) if filesystem.isdir(n) else [n])]
    except Exception as error:  # object stores raise whatever their client raises
        raise NoDumps(f"{url} cannot be read: {error}", url=url) from error
    return filesystem, sorted(found)


def _expand_url(url: str) -> Iterator[Source]:
    filesystem, files = store_files(url)
    if not files:
        raise NoDumps(f"{url} holds no files", url=url)
    for item in files:
        if not _IGNORED.search(item):
            yield Source(filesystem.unstrip_protocol(item), "", False, 0)


def read_many(sources: Sequence[Source]) -> Iterator[tuple[Source, bytes | BadDump]]:
    """Yield the bytes of each source, or why it cannot be read. An archive is read through once."""
    archives: dict[str, list[Source]] = {}
    for source in sources:
        if source.member:
            archives.setdefault(source.path, []).append(source)
        else:
            yield source, _read(source.path)
    for path, members in archives.items():
        yield from _read_archive(path, {source.member: source for source in members})


def _read(path: str) -> bytes | BadDump:
    try:
        if "://" in path:
            import fsspec

            with fsspec.open(path, "rb") as file:
                return _inflated(file.read(BYTES_MAX + 1))
        with open(path, "rb") as local:
            return _inflated(local.read(BYTES_MAX + 1))
    except BadDump as error:
        return error
    except Exception as error:  # object stores raise whatever their client raises
        return BadDump(f"{path} cannot be read: {error}")


def _read_archive(
    path: str, members: dict[str, Source]
) -> Iterator[tuple[Source, bytes | BadDump]]:
    try:
        for name, data in _members(path, members):
            source = members.pop(name, None)
            if source is not None:
                yield source, _guarded(data)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
        for source in members.values():
            yield source, BadDump(f"{source} cannot be read: {error}")


def _members(path: str, wanted: dict[str, Source]) -> Iterator[tuple[str, bytes]]:
    if path.endswith(".zip"):
        with zipfile.ZipFile(path) as archive_zip:
            for name in list(wanted):
                with archive_zip.open(name) as part:
                    yield name, part.read(BYTES_MAX + 1)
        return
    with tarfile.open(path) as archive:
        for info in archive:
            if info.name in wanted and (file := archive.extractfile(info)):
                yield info.name, file.read(BYTES_MAX + 1)


def _guarded(data: bytes) -> bytes | BadDump:
    try:
        return _inflated(data)
    except BadDump as error:
        return error


def _inflated(data: bytes) -> bytes:
    """Undo gzip, also of a torn file, and never beyond BYTES_MAX."""
    if data[:2] == b"\x1f\x8b":
        inflater = zlib.decompressobj(wbits=31)
        try:
            data = inflater.decompress(data, BYTES_MAX + 1)
        except zlib.error as error:
            raise BadDump(f"the gzip data are broken: {error}") from error
    if len(data) > BYTES_MAX:
        raise BadDump(f"the dump is larger than {BYTES_MAX >> 20} MiB")
    return data
