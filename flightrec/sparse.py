"""A column of which only some values are kept: it looks like an array, with one value elsewhere."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class Sparse(Sequence[float]):
    """`values[i]` stands at `places[i]`, which grow; everything else is `otherwise`."""

    length: int
    places: array[int]
    values: array[float] | array[int]
    otherwise: float

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, at: int) -> float: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[float]: ...
    def __getitem__(self, at: int | slice) -> float | Sequence[float]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self.length))]
        at = at + self.length if at < 0 else at
        if not 0 <= at < self.length:
            raise IndexError(at)
        found = bisect_left(self.places, at)
        is_kept = found < len(self.places) and self.places[found] == at
        return self.values[found] if is_kept else self.otherwise
