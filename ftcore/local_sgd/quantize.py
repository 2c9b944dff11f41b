"""Pack float32 numbers into one byte each, with one scale per block, and back.

The error of one packing is at most `error_bound(...)`; a reduction packs twice, once each
contribution and once the sum.
"""

from __future__ import annotations

from typing import Literal

import torch

BLOCK = 256  # numbers under one float32 scale: 1.6 % on top of the bytes

Kind = Literal["int8", "fp8"]
_LARGEST = {"int8": 127.0, "fp8": 448.0}


def packed_bytes(numel: int) -> int:
    """Bytes of `numel` packed numbers. `numel` is a multiple of BLOCK."""
    return numel + numel // BLOCK * 4


def pack(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return uint8: first the scales, then a byte a number. `values` is flat float32."""
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST[kind]
    unit = torch.where(scales > 0, blocks / scales, torch.zeros_like(blocks))
    if kind == "int8":
        small = unit.round().clamp(-127, 127).to(torch.int8)
    else:
        small = unit.clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat([scales.view(-1).view(torch.uint8), small.view(-1).view(torch.uint8)])


def unpack(packed: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the flat float32 numbers. A block that held nan or infinity comes back as such."""
    count = packed.numel() // (BLOCK + 4)
    scales = packed[: 4 * count].clone().view(torch.float32).view(-1, 1)
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    small = packed[4 * count :].view(dtype).view(-1, BLOCK)
    return (small.to(torch.float32) * scales).view(-1)


def error_bound(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The largest |unpack(pack(v)) - v| for each number.

    int8: half a step of 1/127 of the largest in the block. fp8 (e4m3): half a step of three
    mantissa bits, 2**-4 of the number itself, and below 2**-6 half of 2**-9, in units of the scale.
    """
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST[kind]
    if kind == "int8":
        bound = (scales / 2).expand_as(blocks)
    else:
        bound = torch.maximum(blocks.abs() * 2**-4, scales * 2**-10)
    return (bound * (1 + 1e-5)).reshape(-1)
