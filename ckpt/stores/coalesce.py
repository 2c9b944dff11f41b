"""Decide which reads go to the store together: neighbours as one, large ones in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

PIECES_MAX = 1000  # preadv takes at most IOV_MAX = 1024 buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Fill `into` with the bytes of `key` from `offset` on."""

    key: str
    offset: int
    into: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One request: the bytes of `key` from `offset` on fill these buffers one after the other."""

    key: str
    offset: int
    into: tuple[memoryview, ...] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.into))


def coalesce(reads: Iterable[Read], *, part_bytes: int, gap_bytes_max: int) -> list[Batch]:
    """The requests that fill all `reads`, each of at most about `part_bytes`.

    Two reads of one object go together when at most `gap_bytes_max` lie between them; the bytes of
    the gap are read and dropped.

    >>> far = [Read(key="k", offset=o, into=memoryview(bytearray(2))) for o in (0, 3, 90)]
    >>> [(b.offset, b.size_bytes) for b in coalesce(far, part_bytes=9, gap_bytes_max=1)]
    [(0, 5), (90, 2)]
    """
    scrap = memoryview(bytearray(gap_bytes_max))
    batches: list[Batch] = []
    key, start, end = "", 0, 0
    pieces: list[memoryview] = []
    for part in _in_parts(reads, part_bytes):
        gap = part.offset - end
        together = pieces and part.key == key and 0 <= gap <= gap_bytes_max
        small = end - start + len(part.into) <= part_bytes and len(pieces) < PIECES_MAX - 1
        if not (together and small):
            if pieces:
                batches.append(Batch(key=key, offset=start, into=tuple(pieces)))
            key, start, pieces = part.key, part.offset, []
        elif gap:
            pieces.append(scrap[:gap])
        pieces.append(part.into)
        end = part.offset + len(part.into)
    if pieces:
        batches.append(Batch(key=key, offset=start, into=tuple(pieces)))
    return batches


def _in_parts(reads: Iterable[Read], part_bytes: int) -> Iterator[Read]:
    """The non-empty reads in order of key and offset, none larger than `part_bytes`."""
    for read in sorted(reads, key=lambda r: (r.key, r.offset)):
        into = read.into.cast("B") if read.into.nbytes else read.into
        for start in range(0, into.nbytes, part_bytes):
            piece = into[start : start + part_bytes]
            yield Read(key=read.key, offset=read.offset + start, into=piece)
