"""Bytes in memory as torch tensors without a copy."""

from __future__ import annotations

import ctypes

import torch

from ckpt.boxes import whole
from ckpt.dtypes import itemsize
from ckpt.fetch import Image
from ckpt.filling import fill
from ckpt.manifest import Piece, Tensor
from ckpt.reading import Want, copies_for


def dtype_of(name: str) -> torch.dtype:
    """The torch type of a name such as `bfloat16`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def at_address(address: int, piece: Piece, dtype: str) -> torch.Tensor:
    """The stored box at `address`, valid as long as its memory is."""
    if not piece.nbytes:
        return torch.empty(piece.lengths, dtype=dtype_of(dtype))
    memory = (ctypes.c_uint8 * piece.nbytes).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if address % max(itemsize(dtype), 1):
        flat = flat.clone()
    return flat.view(dtype_of(dtype)).view(piece.lengths)


def whole_tensor(tensor: Tensor, image: Image) -> torch.Tensor:
    """All of a stored tensor: where it lies if it is in one piece, else put together."""
    box = whole(tensor.shape)
    for piece in tensor.pieces:
        if (piece.offsets, piece.lengths) == box and piece.nbytes:
            return at_address(image.address(piece.file, piece.offset), piece, tensor.dtype)
    target = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
    want = Want("", tensor.dtype, tensor.shape, box)
    fill([target], [want], copies_for(0, box, tensor), image)
    return target
