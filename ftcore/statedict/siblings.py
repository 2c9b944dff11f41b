"""Make optimizer state for a parameter like that which its optimizer made for a smaller sibling.

A step of the optimizer writes every byte of the state it creates. State made here is zeros of which
the system has not given a page yet, so that a heal that fills it is the first to touch it.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ftcore.statedict.entries import Entry
from ftcore.statedict.plain import TensorRef, dtype_name

LAZY_BYTES_MIN = 1 << 20  # a smaller tensor is not worth a mapping of its own


def examples(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """By id of each parameter, the smallest one that its optimizer treats alike."""
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def kind(p: Tensor) -> tuple[object, ...]:
        return group_of.get(id(p)), type(p), p.dtype, p.device, p.dim(), p.requires_grad

    smallest = {kind(p): p for p in sorted(parameters, key=Tensor.numel, reverse=True)}
    return {id(p): smallest[kind(p)] for p in parameters}


def is_sibling(
    made: Any, example: Tensor, wanted: Any, parameter: Tensor, entries: Mapping[str, Entry]
) -> bool:
    """Whether the `wanted` state is for `parameter` what `made` is for `example`."""
    if isinstance(made, Tensor):
        entry = entries.get(wanted.name) if isinstance(wanted, TensorRef) else None
        return (
            entry is not None
            and entry.alias_of is None
            and type(made) in (Tensor, DTensor)
            and entry.dtype == dtype_name(made.dtype)
            and entry.global_shape == tuple((parameter if _is_full(made, example) else made).shape)
        )
    if isinstance(made, dict) and isinstance(wanted, dict):
        return made.keys() == wanted.keys() and all(
            is_sibling(made[k], example, wanted[k], parameter, entries) for k in made
        )
    return not any(isinstance(side, dict | list | tuple | TensorRef) for side in (made, wanted))


def sibling_of(made: Any, example: Tensor, parameter: Tensor) -> Any:
    """State for `parameter` like `made`, which is that of `example`. Plain values are the same."""
    if isinstance(made, dict):
        return {key: sibling_of(value, example, parameter) for key, value in made.items()}
    if not isinstance(made, Tensor):
        return made
    if _is_full(made, example):
        return _zeros_like(parameter, made.dtype)
    return torch.zeros_like(made)


def _is_full(made: Tensor, example: Tensor) -> bool:
    """Whether it has a value for each value of the parameter. A count of steps has not."""
    return tuple(made.shape) == tuple(example.shape)


def _zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    size = parameter.numel() * dtype.itemsize
    is_plain = parameter.device.type == "cpu" and not isinstance(parameter, DTensor)
    if not is_plain or not parameter.is_contiguous() or size < LAZY_BYTES_MIN:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(parameter.shape)
