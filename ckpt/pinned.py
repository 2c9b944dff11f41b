"""Page-locked host memory, ready soon: huge pages, touched by many threads, then registered with
the driver in one call.

On an H200 host 16 GiB of 4 KiB pages take several seconds to lock, page by page; of huge pages
there are 512 times fewer. Memory that processes share gets huge pages only where
/sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise` (or more); private memory nearly
everywhere. Without them, and without CUDA, everything works, only slower.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch

from ftcore.base.log import event

log = logging.getLogger(__name__)
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


def page_lock(address: int, size: int) -> bool:
    """Register memory with the CUDA driver, so that copies from and to it are asynchronous and run
    at the speed of the link. Without that they still work."""
    error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if error:
        event(log, "memory.not_pinned", level=logging.WARNING, error=error, bytes=size)
    return not error


def page_unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def advise_huge(mapped: mmap.mmap) -> None:
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: small pages, then


class PinnedMemory:
    """Page-locked memory of this process alone, as a flat uint8 tensor."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        touch(self.address, size)
        self.is_locked = page_lock(self.address, size)

    def close(self) -> None:
        """Unlock. The memory itself goes with its last tensor."""
        if self.is_locked:
            page_unlock(self.address)
            self.is_locked = False
        del self.tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
