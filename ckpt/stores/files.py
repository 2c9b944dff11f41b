"""What the kernel must be asked for so that a file is fast to write and then really there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ckpt.stores.base import ALIGNMENT, Outcome
from ckpt.stores.errors import (
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

PARTIAL = ".partial"
BOUNCE_BYTES = 4 << 20
KINDS: dict[int, type[StoreError]] = {
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EFBIG: StoreFull,
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
    errno.EROFS: StoreDenied,
    errno.ENOENT: ObjectMissing,
    errno.ENOTDIR: ObjectMissing,
}
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}
_libc = ctypes.CDLL(None, use_errno=True)
_bounces = threading.local()


@contextmanager
def explained(path: Path, what: str, size_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the path, the errno and the bytes."""
    try:
        yield
    except OSError as error:
        kind = KINDS.get(error.errno or 0, StoreUnavailable)
        name = errno.errorcode.get(error.errno or 0, "?")
        of = "" if size_bytes is None else f" {size_bytes:,} bytes of"
        raise kind(
            f"cannot {what}{of} {path}: {os.strerror(error.errno or 0)} ({name})",
            path=str(path),
            errno=name,
            bytes=size_bytes,
        ) from error


class DirectFile:
    """A new file of known size, written at any offset by any thread, past the page cache.

    O_DIRECT needs memory, offset and length in multiples of 4096. What is not aligned goes through
    a small aligned buffer of the thread; a file system without O_DIRECT gets plain writes. Offsets
    must be aligned unless the file is plain.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.size_bytes = size_bytes
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some kernels create the file before they refuse
            self._file = os.open(path, flags, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            _reserve(self._file, size_bytes)
        except OSError:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise

    @property
    def is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)

    def write(self, data: memoryview, offset: int) -> None:
        if not self.is_direct:
            return _write_all(self._file, data, offset)
        aligned = len(data) // ALIGNMENT * ALIGNMENT if _is_aligned(data) else 0
        try:
            _write_all(self._file, data[:aligned], offset)
            self._bounce(data[aligned:], offset + aligned)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._go_plain()
            _write_all(self._file, data, offset)

    def _bounce(self, data: memoryview, offset: int) -> None:
        """Write unaligned memory, the last block padded with zeros (`sync` cuts the file)."""
        for start in range(0, len(data), BOUNCE_BYTES):
            piece = data[start : start + BOUNCE_BYTES]
            padded = -(-len(piece) // ALIGNMENT) * ALIGNMENT
            bounce = _bounce_buffer()
            bounce[: len(piece)] = piece
            bounce[len(piece) : padded] = bytes(padded - len(piece))
            _write_all(self._file, bounce[:padded], offset + start)

    def _go_plain(self) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def sync(self) -> None:
        """Give the file its exact size and wait until it is on the disk."""
        os.ftruncate(self._file, self.size_bytes)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def _reserve(file: int, size_bytes: int) -> None:
    """Take the space now, so that a full disk is found before the first byte is copied.

    Also faster: parallel direct writes inside a file's size do not wait for each other on ext4.
    """
    if size_bytes == 0:
        return
    size = -(-size_bytes // ALIGNMENT) * ALIGNMENT
    if _libc.fallocate(file, 0, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _is_aligned(data: memoryview) -> bool:
    return int(np.frombuffer(data, np.uint8).ctypes.data) % ALIGNMENT == 0


def _bounce_buffer() -> memoryview:
    if not hasattr(_bounces, "view"):
        _bounces.view = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
    view: memoryview = _bounces.view
    return view


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def make_directory(path: Path) -> None:
    """Make `path` and its parents, each durable in the one above."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    sync_directory(path.parent)


def link_new(source: Path, target: Path) -> Outcome:
    """Give `source` the name `target` if that is free. The source's own name goes away."""
    try:
        os.link(source, target)
        outcome = Outcome.CREATED
    except FileExistsError:
        outcome = Outcome.EXISTS
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _rename_new(source, target)
    source.unlink(missing_ok=True)
    return outcome


def _rename_new(source: Path, target: Path) -> Outcome:
    """For file systems without hard links: look, then rename. Two writers can race."""
    if target.exists():
        source.unlink(missing_ok=True)
        return Outcome.EXISTS
    os.replace(source, target)
    return Outcome.UNGUARDED


def remove_if_orphan(path: Path, older_than_s: float) -> bool:
    """Remove an unfinished file that is old enough and whose writer's lock is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if time.time() - os.fstat(file).st_mtime < older_than_s:
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(file)
