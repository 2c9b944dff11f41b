"""The state of a training rank as named tensors and plain values, live and without a copy."""

from ftcore.statedict.entries import Box, Entry, Layout, first_difference
from ftcore.statedict.errors import (
    CannotStore,
    LayoutDiffers,
    NotAtStepBoundary,
    PlainEncodingInvalid,
)
from ftcore.statedict.flat import FlatState, NamedTensor, flatten, layout
from ftcore.statedict.fresh import prepare
from ftcore.statedict.memory import bytes_of
from ftcore.statedict.own import PerRank, per_rank
from ftcore.statedict.owners import StatePair
from ftcore.statedict.plain import decode, encode, register_type

__all__ = [
    "Box",
    "CannotStore",
    "Entry",
    "FlatState",
    "Layout",
    "LayoutDiffers",
    "NamedTensor",
    "NotAtStepBoundary",
    "PerRank",
    "PlainEncodingInvalid",
    "StatePair",
    "bytes_of",
    "decode",
    "encode",
    "first_difference",
    "flatten",
    "layout",
    "per_rank",
    "prepare",
    "register_type",
]
