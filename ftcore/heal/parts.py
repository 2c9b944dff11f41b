"""Cut a state into parts of equal size: what is asked for, sent, verified and repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PART_BYTES_MIN = 8 << 20  # smaller parts cost a request each, larger ones balance worse
PARTS_MAX = 4096  # keeps the list of what a reader has, sent with each request, at 1 KiB


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes `start` to `end` of the tensor at place `tensor`."""

    tensor: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of bytes of all tensors laid end to end."""

    index: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


def part_bytes_for(total: int) -> int:
    """A size that cuts `total` bytes into at most PARTS_MAX parts of at least PART_BYTES_MIN."""
    fair = -(-total // PARTS_MAX)
    return max(PART_BYTES_MIN, -(-fair // 4096) * 4096)


def cut(sizes: Sequence[int], part_bytes: int) -> tuple[Part, ...]:
    """Cut tensors of these sizes, laid end to end, into parts; the last may be smaller."""
    parts: list[Part] = []
    segments: list[Segment] = []
    offset = filled = 0

    def close() -> None:
        nonlocal offset, filled
        part = Part(index=len(parts), offset=offset, nbytes=filled, segments=tuple(segments))
        parts.append(part)
        offset, filled = offset + filled, 0
        segments.clear()

    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + part_bytes - filled)
            segments.append(Segment(tensor, start, end))
            filled, start = filled + end - start, end
            if filled == part_bytes:
                close()
    if filled:
        close()
    return tuple(parts)


def window(views: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """At most `size` bytes from `start` on of views laid end to end, as at most 512 views."""
    chosen: list[memoryview] = []
    for view in views:
        if start >= len(view):
            start -= len(view)
            continue
        piece = view[start : start + size]
        chosen.append(piece)
        size -= len(piece)
        start = 0
        if size <= 0 or len(chosen) == 512:  # half of IOV_MAX
            break
    return chosen


def to_mask(indices: Iterable[int]) -> int:
    """A set of parts as the bits of an integer."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask
