"""What this machine can do at this minute: the figures to which all others are ratios."""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

CHUNK_BYTES = 16 << 20


def buffer(size_bytes: int) -> memoryview:
    """Aligned memory whose pages are there."""
    view = memoryview(mmap.mmap(-1, -(-size_bytes // 4096) * 4096))
    np.frombuffer(view, np.uint8)[::4096] = 1
    return view


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copy_s(source: memoryview, target: memoryview, *, threads: int) -> float:
    """Copy between two buffers that are in memory, each thread its own part."""
    size = len(source) // threads
    a, b = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)

    def part(number: int) -> None:
        at = slice(number * size, (number + 1) * size)
        np.copyto(b[at], a[at])

    workers = [threading.Thread(target=part, args=(n,)) for n in range(threads)]

    def run() -> None:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return seconds(run)


def write_s(source: memoryview, path: Path, *, threads: int) -> float:
    """O_DIRECT writes of 16 MiB by some threads into one new file, then fsync."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
    file = os.open(path, flags)

    def run() -> None:
        os.posix_fallocate(file, 0, len(source))
        with ThreadPoolExecutor(threads) as pool:
            starts = range(0, len(source), CHUNK_BYTES)
            list(pool.map(lambda o: os.pwrite(file, source[o : o + CHUNK_BYTES], o), starts))
        os.fsync(file)

    try:
        return seconds(run)
    finally:
        os.close(file)


def read_s(target: memoryview, path: Path, *, threads: int, cold: bool) -> float:
    """Read one file in 16 MiB pieces by some threads; cold: after dropping its pages."""
    file = os.open(path, os.O_RDONLY)
    if cold:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            starts = range(0, len(target), CHUNK_BYTES)
            list(pool.map(lambda o: os.preadv(file, [target[o : o + CHUNK_BYTES]], o), starts))

    try:
        return seconds(run)
    finally:
        os.close(file)


def drop_pages(directory: Path) -> None:
    """Make the next read of these files come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def sync_files(directory: Path) -> None:
    """What a peer that calls itself done has not done: fsync its files and directories."""
    for path in [directory, *directory.rglob("*")]:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


class Limits:
    """All limits for one state size, measured again at each call."""

    def __init__(self, size_bytes: int, directory: Path) -> None:
        self._a, self._b = buffer(size_bytes), buffer(size_bytes)
        self._path = directory / "limit.bin"

    def measure(self) -> dict[str, float]:
        copy = copy_s(self._a, self._b, threads=2)
        write = write_s(self._a, self._path, threads=4)
        cold = read_s(self._b, self._path, threads=4, cold=True)
        warm = read_s(self._b, self._path, threads=2, cold=False)
        self._path.unlink()
        return {"copy_s": copy, "write_s": write, "read_cold_s": cold, "read_warm_s": warm}
