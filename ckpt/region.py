"""Shared memory that trainer and daemon both map: no name, so nothing stays behind."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import TracebackType
from typing import Self

from ckpt import pinned
from ckpt.errors import StateTooLarge


class Region:
    """One mapped memfd. `view` is its memory; closing it gives back the mapping and descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> Region:
        """New zeroed memory of at least `size` bytes; pages come with first use or `prefault`."""
        size = max(size + -size % mmap.PAGESIZE, mmap.PAGESIZE)
        free = _memory_available()
        if size > free:
            raise StateTooLarge(f"staging needs {size} bytes, {free} bytes of memory are available")
        fd = os.memfd_create("ckpt-staging", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    def prefault(self) -> None:
        """Have all pages now, huge ones where the system gives them."""
        pinned.advise_huge(self._map)
        pinned.touch(self.address, self.size)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Unmap. Views that are still in use keep the mapping until they are gone."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _memory_available() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
