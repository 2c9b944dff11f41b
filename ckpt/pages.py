"""Have the pages of fresh memory before they are needed, huge ones where there are any. No torch:
the daemon maps memory too, and starts in a fraction of the time without it."""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

_MADV_POPULATE_WRITE = 23
HUGE_PAGE_BYTES = 2 << 20
# Clearing pages is bound by memory, not by processors: 16 threads are as quick as more.
TOUCH_THREADS_MAX = 16


def touch(address: int, size: int, *, threads: int | None = None) -> None:
    """Populate all pages without changing a byte: a first write into a fresh page costs six times
    as much as one into a used page. Kernels before 5.14 refuse, and the first copy pays instead."""
    threads = threads or min(TOUCH_THREADS_MAX, os.cpu_count() or 1)
    step = -(-size // threads)
    step += -step % HUGE_PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)

    def populate(start: int) -> None:
        length = min(step, size - start)
        libc.madvise(
            ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
        )

    with ThreadPoolExecutor(threads, "ckpt-touch") as pool:
        list(pool.map(populate, range(0, size, step)))


def advise_huge(mapped: mmap.mmap) -> None:
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: small pages, then
