"""Reach the plain local tensor inside a parameter or gradient: DTensor, tensor subclasses."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ftcore.reduce.errors import SparseGradient


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(param: torch.Tensor, *, name: str) -> torch.Tensor | None:
    """This rank's part of the gradient, placed like the parameter.

    A gradient that is still a partial sum inside the group (sequence parallel norms) is summed
    there first: a collective of the inner mesh, so all its ranks call this in the same order.
    """
    grad = param.grad
    if grad is None:
        return None
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        if grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        grad = grad.to_local()
    if grad.layout is not torch.strided:
        raise SparseGradient(f"the gradient of {name} is {grad.layout}", parameter=name)
    return grad.detach()


def as_gradient_of(param: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Dress a plain local tensor so that it can be assigned to `param.grad`, without a copy."""
    if not isinstance(param, DTensor):
        return view
    return DTensor.from_local(
        view,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The ordinary tensors a tensor subclass is made of (torchao's quantized weights, DTensor)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]
