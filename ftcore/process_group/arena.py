"""Memory that a process shares with its child: anonymous, so nothing is left when both die."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass

import torch

_ALIGN = 64
_FIRST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of one segment."""

    segment: int
    offset: int
    bytes: int


class Segment:
    """One anonymous file, mapped here. The other process maps the same descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size)

    def close_fd(self) -> None:
        """The other process has it; the mapping here stays until nobody uses it."""
        os.close(self.fd)
        self.fd = -1

    def tensor(self, offset: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """A tensor in the shared memory itself."""
        count = 1
        for side in shape:
            count *= side
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)


class Arena:
    """Hands out regions, and makes a larger segment when none is free. Thread-safe."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._free: list[Region] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[Region, Segment | None]:
        """Return a region of at least `size` bytes, and the segment if it is a new one: the other
        process must be told of it first."""
        wanted = -(-max(size, 1) // _ALIGN) * _ALIGN
        with self._lock:
            fitting = [r for r in self._free if r.bytes >= wanted]
            new = None if fitting else self._grow(wanted)
            found = min(fitting or self._free[-1:], key=lambda r: r.bytes)
            self._free.remove(found)
            if found.bytes > wanted:
                rest = Region(found.segment, found.offset + wanted, found.bytes - wanted)
                self._free.append(rest)
            return Region(found.segment, found.offset, wanted), new

    def give_back(self, region: Region) -> None:
        """Neighbours are joined again, so that many small regions do not crumble a segment."""
        with self._lock:
            for other in list(self._free):
                if other.segment == region.segment and (
                    other.offset + other.bytes == region.offset
                    or region.offset + region.bytes == other.offset
                ):
                    self._free.remove(other)
                    start = min(other.offset, region.offset)
                    region = Region(region.segment, start, other.bytes + region.bytes)
            self._free.append(region)

    def _grow(self, wanted: int) -> Segment:
        held = sum(segment.size for segment in self.segments)
        size = max(_FIRST_BYTES, held, wanted)
        fd = os.memfd_create("ftcore-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        segment = Segment(fd, size)
        self.segments.append(segment)
        self._free.append(Region(len(self.segments) - 1, 0, size))
        return segment
