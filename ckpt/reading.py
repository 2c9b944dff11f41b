"""Decide which bytes of which files a state needs, and what of it a checkpoint cannot give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.boxes import Box, missing_elements, overlap, whole
from ckpt.dtypes import itemsize
from ckpt.manifest import Manifest, Piece, Tensor

# Reads are cut into units of this many chunks: one unit is read and checked while it is in cache.
CHUNKS_PER_UNIT = 32
PER_RANK = ".@rank"


class Want(NamedTuple):
    """A box of a tensor that the state has room for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


class Copy(NamedTuple):
    """Elements to bring from a stored piece to a wanted box."""

    want: int
    piece: Piece
    common: Box


class Extent(NamedTuple):
    """Whole chunks of one file: [start, end) in bytes."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a checkpoint and a state differ. `kept` is per-rank state that only the state has."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.incomplete)

    def describe(self) -> str:
        """One sentence with counts and the first names of each kind."""
        parts = []
        for kind in ("missing", "unexpected", "mismatched", "incomplete"):
            names = getattr(self, kind)
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                parts.append(f"{len(names)} {kind} ({', '.join(names[:5])}{more})")
        return "; ".join(parts) or "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to read and where it goes."""

    copies: tuple[Copy, ...]
    extents: tuple[Extent, ...]
    report: Report

    @property
    def bytes(self) -> int:
        return sum(e.end - e.start for e in self.extents)


def plan_read(
    wants: Sequence[Want],
    manifest: Manifest,
    *,
    select: Callable[[str], bool] = lambda name: True,
) -> ReadPlan:
    """Match `wants` with a manifest. Names that `select` refuses play no part."""
    copies: list[Copy] = []
    problems: dict[str, list[str]] = {
        k: [] for k in ("missing", "mismatched", "incomplete", "kept")
    }
    names, tensors = set(), manifest.tensors
    for index, want in enumerate(wants):
        name, dtype, shape, box = want
        names.add(name)
        if not select(name):
            continue
        stored = tensors.get(name)
        if stored is None:
            problems["kept" if PER_RANK in name else "missing"].append(name)
        elif stored[:2] != (dtype, shape):
            problems["mismatched"].append(_mismatch(want, stored))
        elif len(stored[2]) == 1 and stored[2][0][3:] == box and box.elements:
            copies.append(Copy(index, stored[2][0], box))  # by far the most frequent, and quick
        else:
            found = copies_for(index, box, stored)
            if not _is_covered(box, found):
                problems["incomplete"].append(name)
            copies += found
    unexpected = (n for n in manifest.tensors if n not in names and select(n) and PER_RANK not in n)
    report = Report(
        unexpected=tuple(unexpected), **{kind: tuple(found) for kind, found in problems.items()}
    )
    extents = extents_of(copies, wants, manifest)
    return ReadPlan(copies=tuple(copies), extents=tuple(extents), report=report)


def copies_for(index: int, box: Box, stored: Tensor) -> list[Copy]:
    """How to fill `box` from the pieces of a tensor. Each element comes from one piece."""
    first = stored.pieces[0] if stored.pieces else None
    if first is not None and (first.offsets, first.lengths) == box:
        return [Copy(index, first, box)] if box.elements else []
    found = []
    for piece in stored.pieces:
        common = overlap(Box(piece.offsets, piece.lengths), box)
        if common is not None:
            found.append(Copy(index, piece, common))
    return found


def _is_covered(box: Box, copies: Sequence[Copy]) -> bool:
    if not box.elements or (len(copies) == 1 and copies[0].common == box):
        return True
    moved = (Box(_minus(c.common.offsets, box.offsets), c.common.lengths) for c in copies)
    return not missing_elements(box.lengths, moved)


def _minus(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _mismatch(want: Want, stored: Tensor) -> str:
    return (
        f"{want.name} (saved {stored.dtype}{list(stored.shape)}, "
        f"here {want.dtype}{list(want.shape)})"
    )


def byte_range(copy: Copy, dtype: str) -> tuple[int, int]:
    """First and last-plus-one byte in the file that the elements of `copy` span."""
    _, piece, common = copy
    if common == piece[3:]:
        return piece.offset, piece.offset + piece.nbytes
    size = itemsize(dtype)
    first = last = 0
    for o, n, co, cn in zip(
        piece.offsets, piece.lengths, common.offsets, common.lengths, strict=True
    ):
        first = first * n + co - o
        last = last * n + co + cn - 1 - o
    return piece.offset + first * size, piece.offset + (last + 1) * size


def extents_of(copies: Iterable[Copy], wants: Sequence[Want], manifest: Manifest) -> list[Extent]:
    """The chunks that hold these copies, neighbours joined."""
    chunk = manifest.chunk_bytes
    needed: dict[int, list[tuple[int, int]]] = {}
    for copy in copies:
        start, end = byte_range(copy, wants[copy.want].dtype)
        first, last = start // chunk, -(-end // chunk)
        ranges = needed.setdefault(copy.piece.file, [])
        if ranges and ranges[-1][0] <= first <= ranges[-1][1]:  # small neighbours, mostly
            first, last = ranges[-1][0], max(last, ranges.pop()[1])
        ranges.append((first, last))
    extents = []
    for file, ranges in sorted(needed.items()):
        size = manifest.files[file].size
        for first, last in _joined(ranges):
            extents.append(Extent(file, first * chunk, min(last * chunk, size)))
    return extents


def _joined(ranges: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    ranges.sort()
    first, last = ranges[0]
    for start, end in ranges[1:]:
        if start > last:
            yield first, last
            first, last = start, end
        else:
            last = max(last, end)
    yield first, last


def units(extents: Iterable[Extent], chunk_bytes: int) -> Iterable[Extent]:
    """Extents cut into pieces that one thread reads and checks at a time."""
    step = chunk_bytes * CHUNKS_PER_UNIT
    for file, start, end in extents:
        for at in range(start, end, step):
            yield Extent(file, at, min(at + step, end))


def wants_everything(tensors: Mapping[str, Tensor]) -> list[Want]:
    """Every tensor of a checkpoint, whole."""
    return [Want(name, t.dtype, t.shape, whole(t.shape)) for name, t in tensors.items()]
