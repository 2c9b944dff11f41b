"""Boxes of tensors: where two overlap, and which byte runs of a stored box hold the overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """`lengths` elements from `offsets` in each dimension. A scalar has no dimensions."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.lengths)


class Run(NamedTuple):
    """Elements that are adjacent both in a source box and in a target box."""

    source: int
    target: int
    elements: int


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """The elements that both boxes hold, or None. Scalars always overlap; empty boxes never do."""
    low = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    high = tuple(min(ao + al, bo + bl) for ao, al, bo, bl in ends)
    lengths = tuple(h - lo for h, lo in zip(high, low, strict=True))
    return Box(low, lengths) if all(n > 0 for n in lengths) else None


def runs(source: Box, target: Box, common: Box) -> Iterable[Run]:
    """Yield the longest runs of `common`, as element positions in C-contiguous `source` and
    `target`. Halving a tensor along its first dimension is one run."""
    inner, split = 1, len(common.lengths)
    while split and (split == len(common.lengths) or _spans(source, target, common, split)):
        split -= 1
        inner *= common.lengths[split]
    for index in _indices(common.lengths[:split]):
        at = tuple(o + i for o, i in zip(common.offsets, index, strict=False))
        at += common.offsets[split:]
        yield Run(_position(source, at), _position(target, at), inner)


def _spans(source: Box, target: Box, common: Box, dim: int) -> bool:
    """Whether `common` is as long as both boxes in `dim`, so that rows before it are adjacent."""
    return common.lengths[dim] == source.lengths[dim] == target.lengths[dim]


def _position(box: Box, at: Sequence[int]) -> int:
    position = 0
    for offset, length, index in zip(box.offsets, box.lengths, at, strict=True):
        position = position * length + index - offset
    return position


def _indices(lengths: Sequence[int]) -> Iterable[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    for first in range(lengths[0]):
        for rest in _indices(lengths[1:]):
            yield (first, *rest)


def missing_elements(shape: Sequence[int], boxes: Iterable[Box]) -> int:
    """How many elements of a tensor of `shape` no box holds. Boxes may overlap."""
    target = [whole(shape)] if prod(shape) else []
    for box in set(boxes):
        target = [rest for part in target for rest in subtract(part, box)]
    return sum(part.elements for part in target)


def subtract(part: Box, box: Box) -> list[Box]:
    """`part` without `box`, as disjoint boxes."""
    common = overlap(part, box)
    if common is None:
        return [part]
    rest, offsets, lengths = [], list(part.offsets), list(part.lengths)
    for dim in range(len(offsets)):
        low, high = common.offsets[dim], common.offsets[dim] + common.lengths[dim]
        end = offsets[dim] + lengths[dim]
        for start, stop in ((offsets[dim], low), (high, end)):
            if stop > start:
                o, n = list(offsets), list(lengths)
                o[dim], n[dim] = start, stop - start
                rest.append(Box(tuple(o), tuple(n)))
        offsets[dim], lengths[dim] = low, high - low
    return rest
