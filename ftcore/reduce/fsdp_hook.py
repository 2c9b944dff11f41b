"""Reduce FSDP2's gradients across replica groups inside its backward, by its all-reduce hook.

An option beside Buckets: no buffers of our own, reduced as soon as each module's reduce-scatter
ends. It reduces on every backward pass (FSDP2 ignores set_requires_all_reduce here), so with
accumulation call set_requires_gradient_sync(False) for all passes but the last. FSDP2 refuses
hooks on modules with several parameter groups; use Buckets there.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from ftcore.process_group.base import Group


class FsdpHooks:
    """The hooks of one model. `weight` may be set before each step; all weights add up to 1."""

    def __init__(self, group: Group, weight: float) -> None:
        self.weight = weight
        self._group = group
        self._alive: list[torch.Tensor] = []

    def __call__(self, reduced: torch.Tensor) -> None:
        # FSDP2 may free its buffer while an aborted collective still writes: keep it.
        self._alive.append(reduced)
        if self.weight == 0.0:
            reduced.zero_()
        else:
            reduced.mul_(self.weight)
        self._group.allreduce([reduced]).wait()

    def finish(self) -> None:
        """Call after backward: raises the group's first error, and frees what was kept alive."""
        try:
            self._group.settle()
        finally:
            self._alive.clear()


def reduce_in_fsdp(model: torch.nn.Module, group: Group, *, weight: float) -> FsdpHooks:
    """Hook all FSDP modules of `model`. From now on the group holds its errors until finish(),
    since FSDP2 cannot stop in the middle of a backward pass."""
    group.hold_errors = True
    hooks = FsdpHooks(group, weight)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hooks)
    return hooks
