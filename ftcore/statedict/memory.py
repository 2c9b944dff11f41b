"""Find the memory of tensors: subclasses taken apart, shards located, bytes seen without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from ftcore.statedict.entries import Box
from ftcore.statedict.errors import CannotStore

try:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # a torch built without distributed has no DTensor to meet either
    DTensor = None


class Leaf(NamedTuple):
    """A strided tensor with memory of its own, found in a tensor of the state."""

    suffix: str  # "" or ".scale": the way from the tensor of the state to this one
    tensor: Tensor
    global_shape: tuple[int, ...]
    box: Box


_PLAIN = (Tensor, Parameter)


def leaves(tensor: Tensor, *, path: str) -> Iterator[Leaf]:
    """Take a tensor apart: DTensor to its shard, subclasses through `__tensor_flatten__`."""
    if type(tensor) in _PLAIN:
        _check_has_bytes(tensor, path)
        yield _whole("", tensor.detach())
    elif DTensor is not None and isinstance(tensor, DTensor):
        yield from _shard_leaves(tensor, path)
    else:
        for suffix, inner in _strided(tensor, "", path):
            yield _whole(suffix, inner)


def _shard_leaves(tensor: Any, path: str) -> Iterator[Leaf]:
    local = tensor._local_tensor
    global_shape, mesh = tuple(tensor.shape), tensor.device_mesh
    if any(p.is_partial() for p in tensor.placements):
        raise CannotStore(
            f"{path} is a DTensor with a partial sum, which has no value yet", path=path
        )
    shape, offset = compute_local_shape_and_global_offset(global_shape, mesh, tensor.placements)
    box = Box(offset=tuple(offset), shape=tuple(shape))
    for suffix, inner in _strided(local, "", path):
        if tuple(inner.shape) == box.shape:
            yield Leaf(suffix=suffix, tensor=inner, global_shape=global_shape, box=box)
        else:  # a scale or packed data: its box counts ranks, so it is never mistaken for a part
            yield _stacked(suffix, inner, mesh)


def _stacked(suffix: str, inner: Tensor, mesh: Any) -> Leaf:
    sizes, shape = tuple(mesh.shape), tuple(inner.shape)
    offset = (*mesh.get_coordinate(), *(0 for _ in shape))
    box = Box(offset=offset, shape=(1,) * len(sizes) + shape)
    return Leaf(suffix=suffix, tensor=inner, global_shape=sizes + shape, box=box)


def _strided(tensor: Tensor, suffix: str, path: str) -> Iterator[tuple[str, Tensor]]:
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _strided(getattr(tensor, name), f"{suffix}.{name}", path + suffix)
        return
    _check_has_bytes(tensor, path + suffix)
    yield suffix, tensor.detach()


def _check_has_bytes(tensor: Tensor, path: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise CannotStore(
            f"{path} is a {tensor.layout} tensor, which has no plain memory",
            remedy="Store its parts (indices and values) as strided tensors in `state_dict()`.",
            path=path,
        )
    if tensor.is_meta:
        raise CannotStore(
            f"{path} is on the meta device and has no bytes",
            remedy="Materialise the model (`to_empty`, then initialise) before training.",
            path=path,
        )


def _whole(suffix: str, tensor: Tensor) -> Leaf:
    shape = tuple(tensor.shape)
    return Leaf(suffix, tensor, shape, Box((0,) * len(shape), shape))


MemoryKey: TypeAlias = tuple[object, ...]


def memory_key(leaf: Tensor) -> MemoryKey:
    """Equal for two tensors that show the same bytes in the same way."""
    return (leaf.device, leaf.data_ptr(), tuple(leaf.shape), leaf.stride(), leaf.dtype)


def is_plain_memory(leaf: Tensor) -> bool:
    """True when the bytes lie in host memory, in order, and are the values themselves."""
    return leaf.is_cpu and leaf.is_contiguous() and not (leaf.is_conj() or leaf.is_neg())


def bytes_of(leaf: Tensor) -> memoryview:
    """The writable bytes of a tensor for which `is_plain_memory` holds: a view, no copy."""
    assert is_plain_memory(leaf), "no byte view of a tensor that is not plain memory"
    if leaf.numel() == 0:
        return memoryview(bytearray())
    return memoryview(leaf.detach().reshape(-1).view(torch.uint8).numpy())


def typed_view(raw: Tensor, leaf: Tensor) -> Tensor:
    """`raw` (uint8, exactly the bytes of `leaf`) seen with the dtype and shape of `leaf`."""
    return raw.view(leaf.dtype).reshape(leaf.shape)


def copy_out(leaf: Tensor, raw: Tensor) -> None:
    """Copy the values of `leaf` into `raw`, uint8 of the same number of bytes, in logical order."""
    if leaf.numel():
        with torch.no_grad():
            typed_view(raw, leaf).copy_(leaf)


def copy_in(raw: Tensor, leaf: Tensor) -> None:
    """Copy `raw` into the memory of `leaf`. An expanded tensor takes one of its copies."""
    if leaf.numel() == 0:
        return
    values = typed_view(raw, leaf)
    for dim, stride in enumerate(leaf.stride()):
        if stride == 0:
            leaf, values = leaf.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.no_grad():
        leaf.copy_(values)
