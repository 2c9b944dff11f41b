"""Say which tensors a state has, and name the first way in which two states differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import xxhash

from ftcore.statedict.errors import PlainEncodingInvalid


class Box(NamedTuple):
    """The part of a global tensor that this rank holds."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Entry(NamedTuple):
    """One tensor of a state, without its memory. A tuple: there are tens of thousands of them."""

    name: str
    dtype: str  # as torch prints it, without "torch."
    global_shape: tuple[int, ...]
    box: Box
    itemsize: int
    alias_of: str | None = None  # the same memory as an earlier entry: its bytes travel once
    lazy: bool = False  # created by the first optimizer step, so a fresh state lacks it

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return self.box.shape

    @property
    def nbytes(self) -> int:
        return prod(self.box.shape) * self.itemsize

    def describe(self) -> str:
        """`float32[16, 8]`, with the box when it is a part, with the tie when it is tied."""
        text = f"{self.dtype}{list(self.global_shape)}"
        if self.box.shape != self.global_shape:
            text += f" at {list(self.box.offset)}+{list(self.box.shape)}"
        return text + (f" tied to {self.alias_of}" if self.alias_of else "")


@dataclass(frozen=True)
class Layout:
    """The tensors of a state in order."""

    entries: tuple[Entry, ...]

    @cached_property
    def hash(self) -> int:
        """64 bits that are equal on all machines and versions for equal layouts (XXH3-64)."""
        return xxhash.xxh3_64_intdigest(self.to_bytes())

    @cached_property
    def nbytes(self) -> int:
        """Bytes to move: those of all entries that are not tied to an earlier one."""
        return sum(entry.nbytes for entry in self.entries if entry.alias_of is None)

    @property
    def static(self) -> Layout:
        """Without what the first optimizer step creates: equal on a trained and a fresh group."""
        return Layout(tuple(entry for entry in self.entries if not entry.lazy))

    def to_bytes(self) -> bytes:
        """Canonical JSON, also what `hash` is taken of."""
        rows = [
            [
                e.name,
                e.dtype,
                e.itemsize,
                e.global_shape,
                e.box.offset,
                e.box.shape,
                e.alias_of,
                e.lazy,
            ]
            for e in self.entries
        ]
        return json.dumps(["ftlayout", 1, rows], separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Layout:
        """The inverse of `to_bytes`. Any other bytes raise PlainEncodingInvalid."""
        try:
            magic, version, rows = json.loads(data)
            if (magic, version) != ("ftlayout", 1):
                raise ValueError(f"{magic!r:.40} version {version!r:.40} is not ftlayout version 1")
            return Layout(tuple(map(_read_entry, rows)))
        except (ValueError, TypeError, RecursionError) as error:
            raise PlainEncodingInvalid(f"a layout cannot be read: {error}") from error


def _read_entry(row: Any) -> Entry:
    name, dtype, itemsize, global_shape, offset, shape, alias_of, lazy = row
    _need(type(name) is str and type(dtype) is str and type(lazy) is bool)
    _need(alias_of is None or type(alias_of) is str)
    _need(type(itemsize) is int and 1 <= itemsize <= 64)
    for numbers in (global_shape, offset, shape):
        _need(all(type(n) is int and 0 <= n < 1 << 62 for n in numbers))
        _need(len(numbers) == len(shape))
    box = Box(offset=tuple(offset), shape=tuple(shape))
    return Entry(
        name=name,
        dtype=dtype,
        global_shape=tuple(global_shape),
        box=box,
        itemsize=itemsize,
        alias_of=alias_of,
        lazy=lazy,
    )


def _need(condition: bool) -> None:
    if not condition:
        raise ValueError("an entry has a field of the wrong type or size")


def first_difference(
    a: Layout, b: Layout, *, names: Sequence[str] = ("this group", "the other")
) -> str | None:
    """A sentence that names the first entry in which two layouts differ, or None if equal."""
    left, right = names
    in_a, in_b = {e.name for e in a.entries}, {e.name for e in b.entries}
    for x, y in zip_longest(a.entries, b.entries):
        if x == y:
            continue
        if x is not None and x.name not in in_b:
            return f"{left} has {x.name} ({x.describe()}), which {right} has not"
        if y is not None and y.name not in in_a:
            return f"{right} has {y.name} ({y.describe()}), which {left} has not"
        assert x is not None and y is not None, "equal names at unequal lengths: a name repeats"
        if x.name != y.name:
            return f"{left} has {x.name} where {right} has {y.name}: the order differs"
        return f"{x.name} is {_differing(x, y)} in {left} and {_differing(y, x)} in {right}"
    return None


def _differing(x: Entry, y: Entry) -> str:
    """The description; when both read the same, the fields that differ."""
    if x.describe() != y.describe():
        return x.describe()
    pairs = zip(x._fields, x, y, strict=True)
    return ", ".join(f"{name}={mine}" for name, mine, other in pairs if mine != other)
