"""Lay texts of archives and object stores into a folder, so that they are read like files."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flightrec.sources import TAR, archive_errors, store_files

FILE_BYTES_MAX = 512 << 20  # a text above this is not read: cut it first
TEXTS = {".log", ".txt", ".out", ".err", ".stack", ".pyspy", ".ras"}  # fetched from object stores


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A text under the name that people know, and where it lies now."""

    name: str
    path: str


def is_packed(path: str) -> bool:
    """Whether what the path names has to be fetched or unpacked first."""
    return "://" in path or (path.endswith((*TAR, ".zip")) and Path(path).is_file())


def unpack(path: str, folder: Path) -> Iterator[Unpacked]:
    """The members that may be texts, as files in `folder`: anything that does not begin like a
    pickle; of an object store only what is named like a text, for each look there costs a request.
    """
    if "://" in path:
        yield from _from_store(path, folder)
    elif path.endswith(".zip"):
        with archive_errors(path), zipfile.ZipFile(path) as packed:
            for info in packed.infolist():
                if not info.is_dir() and info.file_size <= FILE_BYTES_MAX:
                    with packed.open(info) as member:
                        yield from _kept(member, f"{path}!{info.filename}", info.filename, folder)
    else:
        with archive_errors(path), tarfile.open(path) as archive:
            for entry in archive:
                file = archive.extractfile(entry) if entry.isfile() else None
                if file is not None and entry.size <= FILE_BYTES_MAX:
                    yield from _kept(file, f"{path}!{entry.name}", entry.name, folder)


def _from_store(url: str, folder: Path) -> Iterator[Unpacked]:
    filesystem, names = store_files(url)
    for name in names:
        if Path(name.removesuffix(".gz")).suffix in TEXTS:
            with filesystem.open(name, "rb") as file:
                yield from _kept(file, filesystem.unstrip_protocol(name), name, folder)


def _kept(file: IO[bytes], name: str, inside: str, folder: Path) -> Iterator[Unpacked]:
    """The parts of the name stay, for they tell ranks; where it would lead does not."""
    first = file.read(1)
    if first in (b"", b"\x80"):
        return
    parts = [part for part in inside.split("/") if part not in ("", ".", "..")]
    target = Path(tempfile.mkdtemp(dir=folder)).joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        out.write(first)
        shutil.copyfileobj(file, out)
    yield Unpacked(name, str(target))
