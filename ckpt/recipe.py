"""Read a state again that was flattened before: if its shape is the same, only tensors and plain
values are collected, at about a microsecond for each, and nothing is planned or named anew."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from ftcore.statedict import FlatState, encode
from ftcore.statedict.memory import leaves
from ftcore.statedict.owners import Owner
from ftcore.statedict.plain import TensorRef

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SIMPLE = (int, float, str, bool, type(None), bytes)
Signature = tuple[object, ...]


class Changed(Exception):
    """The state no longer has the shape that the recipe knows."""


class Walk:
    """One pass over a state: its containers, its tensors and its plain values, in order."""

    def __init__(self, owners: dict[int, Owner]) -> None:
        self.shape: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.plain: list[object] = []
        self._owners = owners

    def visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            self.tensors.append(value)
        elif kind is dict or kind is OrderedDict:
            self._visit_dict(kind, value)
        elif kind is list or kind is tuple:
            self.shape.append((kind, len(value)))
            for part in value:
                self.visit(part)
        elif isinstance(value, torch.Tensor):
            self.shape.append(kind)
            self.tensors += [leaf.tensor for leaf in leaves(value, path="")]
        elif id(value) in self._owners:
            self.shape.append(id(value))
            self.visit(self._owners[id(value)].read())
        elif hasattr(value, "state_dict") or isinstance(value, torch.nn.Module):
            raise Changed
        else:
            self.plain.append(value)

    def _visit_dict(self, kind: type, value: dict[Any, Any]) -> None:
        self.shape.append((kind, tuple(value)))
        tensors = self.tensors
        for part in value.values():
            if type(part) in _PLAIN_TENSORS:
                tensors.append(part)
            else:
                self.visit(part)


def signature(tensor: torch.Tensor) -> Signature:
    """Equal while a tensor shows the same bytes in the same way."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _is_same(tensor: torch.Tensor, seen: Signature) -> bool:
    return bool(
        tensor.data_ptr() == seen[0]
        and tensor.shape == seen[1]
        and tensor.stride() == seen[2]
        and tensor.dtype == seen[3]
    )


class Recipe:
    """What a state looked like, and how to read it again."""

    def __init__(self, state: object, flat: FlatState) -> None:
        try:
            self._owned = [_at(state, keys) for keys in flat.owners]  # keeps their ids from reuse
        except (KeyError, IndexError, TypeError) as error:
            raise Changed from error
        self._owners = {
            id(value): owner for value, owner in zip(self._owned, flat.owners.values(), strict=True)
        }
        walk = self._walk(state)
        self._shape = walk.shape
        self._signatures = [signature(t) for t in walk.tensors]
        if self._signatures != [signature(t.tensor) for t in flat.tensors]:
            raise Changed  # an order that this walk does not know
        self._plain_values = walk.plain
        self._plain = flat.plain
        self._segments: list[str] | None = None
        self._state_plain = flat

    @property
    def is_pure(self) -> bool:
        """Whether the state is containers only: no object that may hand out copies."""
        return not self._owners

    def _walk(self, state: object) -> Walk:
        walk = Walk(self._owners)
        walk.visit(state)
        return walk

    def read(self, state: object) -> tuple[Sequence[torch.Tensor], bytes]:
        """The tensors of `state`, in the order of the entries, and its plain values encoded.

        Raises Changed when names, shapes, types or memory are not as they were.
        """
        try:
            walk = self._walk(state)
        except (KeyError, AttributeError) as error:  # an optimizer with other parameters
            raise Changed from error
        if walk.shape != self._shape or len(walk.tensors) != len(self._signatures):
            raise Changed
        if not all(map(_is_same, walk.tensors, self._signatures)):
            raise Changed
        return walk.tensors, self._encoded(walk)

    def _encoded(self, walk: Walk) -> bytes:
        if same_values(walk.plain, self._plain_values):
            return self._plain
        if self._segments is None:
            self._segments = self._cut()
        if len(self._segments) != len(walk.plain) + 1:
            raise Changed
        parts = [self._segments[0]]
        for value, segment in zip(walk.plain, self._segments[1:], strict=True):
            parts += [_encode_one(value), segment]
        self._plain = "".join(parts).encode("utf-8", "surrogatepass")
        self._plain_values = walk.plain
        return self._plain

    def _cut(self) -> list[str]:
        """The encoding of the state around its plain values, which alone change."""
        tree = self._state_plain.tree
        count = 0

        def holed(value: Any) -> Any:
            nonlocal count
            if type(value) in (dict, OrderedDict):
                return type(value)((key, holed(part)) for key, part in value.items())
            if type(value) in (list, tuple):
                return type(value)(holed(part) for part in value)
            if isinstance(value, TensorRef):
                return value
            count += 1
            return f"\x00hole{count - 1}\x00"

        text = encode(holed(tree)).decode("utf-8", "surrogatepass")
        return re.split(r'"\\u0000hole\d+\\u0000"', text)


def _encode_one(value: object) -> str:
    """One plain value as it stands inside an encoded tree."""
    text = encode(value).decode("utf-8", "surrogatepass")
    return text[text.index(",", text.index(",") + 1) + 1 : -1]


def same_values(a: list[object], b: list[object]) -> bool:
    """Equal, of equal types, and certainly so: a nan or an array counts as changed."""
    return len(a) == len(b) and all(map(_same_value, a, b))


def _same_value(x: object, y: object) -> bool:
    if type(x) is not type(y) or type(x) not in _SIMPLE:
        return False
    return x == y and (x != 0.0 or str(x) == str(y))  # minus zero is another value


def _at(state: Any, keys: Sequence[object]) -> Any:
    for key in keys:
        state = state[key]
    return state
