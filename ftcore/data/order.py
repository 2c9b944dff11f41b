"""Shuffle a data set of any size so that each place can be computed alone, in constant memory.

A Feistel network permutes the numbers of as many bits as the size has; a result outside the size
is permuted again until it falls inside (cycle walking: J. Black, P. Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002). At most two walks are expected, as the domain is less than
twice the size. The round function is the mixer of splitmix64 (G. Steele, D. Lea, C. Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftcore.data.seeds import derive

ROUNDS = 8  # four make it pseudorandom (Luby, Rackoff 1988); tiny domains mix slowly
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Permutation:
    """The order of samples 0 to `size` - 1 in one epoch: `permutation[i]` is the i-th of them."""

    seed: int
    epoch: int
    size: int
    _keys: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _left: int = field(init=False, repr=False, compare=False)  # bits of each half
    _right: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a data set of {self.size} samples has no order")
        bits = (self.size - 1).bit_length()
        keys = tuple(derive(b"order", self.seed, self.epoch, r) for r in range(ROUNDS))
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_left", bits // 2)
        object.__setattr__(self, "_right", bits - bits // 2)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"there is no sample {index} of {self.size}")
        value = self._once(index)
        while value >= self.size:
            value = self._once(value)
        return value

    def __iter__(self) -> Iterator[int]:
        return (self[i] for i in range(self.size))

    def index_of(self, sample: int) -> int:
        """The inverse: at which place of the epoch `sample` comes."""
        if not 0 <= sample < self.size:
            raise IndexError(f"there is no sample {sample} of {self.size}")
        value = self._back(sample)
        while value >= self.size:
            value = self._back(value)
        return value

    def _once(self, value: int) -> int:
        left, right = value >> self._right, value & ((1 << self._right) - 1)
        for number, key in enumerate(self._keys):
            left, right = self._round(number, key, left, right)
        return left << self._right | right

    def _back(self, value: int) -> int:
        left, right = value >> self._right, value & ((1 << self._right) - 1)
        for number in reversed(range(ROUNDS)):
            left, right = self._round(number, self._keys[number], left, right)
        return left << self._right | right

    def _round(self, number: int, key: int, left: int, right: int) -> tuple[int, int]:
        """Change one half by the other; its own inverse."""
        if number % 2:
            return left, right ^ (_mix(left ^ key) & ((1 << self._right) - 1))
        return left ^ (_mix(right ^ key) & ((1 << self._left) - 1)), right


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
