"""One flat bucket: gradients are copied in unless they lie there already, and shown as views."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ftcore.reduce.exact import Deal
from ftcore.reduce.gradients import as_gradient_of, local_gradient, local_part
from ftcore.reduce.layout import BucketPlan, Slot

# Zeros behind the gradients, so that they split evenly among this many ranks without a copy.
_SLACK = 256


def slots_of(params: Mapping[str, torch.Tensor]) -> list[Slot]:
    return [_slot(name, local_part(param)) for name, param in params.items()]


def _slot(name: str, part: torch.Tensor) -> Slot:
    return Slot(
        name=name,
        shape=tuple(part.shape),
        dtype=str(part.dtype),
        device=str(part.device),
        numel=part.numel(),
        bytes=part.numel() * part.element_size(),
    )


class FlatBucket:
    """`flat` holds the reduced gradients; each shard in exact mode has a flat tensor of its own."""

    def __init__(self, plan: BucketPlan, params: Mapping[str, torch.Tensor]) -> None:
        self.names = [slot.name for slot in plan.slots]
        self.numel = plan.numel
        self.shards: dict[int, torch.Tensor] = {}
        self._params = [params[name] for name in self.names]
        self._shapes = [slot.shape for slot in plan.slots]
        self._sizes = [slot.numel for slot in plan.slots]
        self._spare: list[torch.Tensor] = []
        self._views_of: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.flat = self._new_flat()

    def _new_flat(self) -> torch.Tensor:
        like = local_part(self._params[0])
        return torch.zeros(self.numel + _SLACK, dtype=like.dtype, device=like.device)

    def of_shard(self, shard: int) -> torch.Tensor:
        if shard not in self.shards:
            self.shards[shard] = self._spare.pop() if self._spare else self._new_flat()
        return self.shards[shard]

    def forget_shards(self) -> None:
        self._spare += self.shards.values()
        self.shards = {}

    def padded(self, flat: torch.Tensor, deal: Deal) -> torch.Tensor:
        """The gradients and as many zeros as make them divisible by the world size."""
        numel = max(self.numel, 1)
        extra = -numel % deal.world_size
        return flat[: numel + (extra if extra < _SLACK else 0)]

    def fill(self, flat: torch.Tensor) -> list[str]:
        """Bring all gradients into `flat`. Returns the names of parameters that have none."""
        views, shown = self._views(flat)
        targets, sources, missing = [], [], []
        for name, param, view, grad in zip(self.names, self._params, views, shown, strict=True):
            if param.grad is grad:
                continue
            source = local_gradient(param, name=name)
            if source is None:
                missing.append(name)
                view.zero_()
            else:
                targets.append(view)
                sources.append(source)
        if targets:
            torch._foreach_copy_(targets, sources)
        return missing

    def show(self, flat: torch.Tensor) -> None:
        """Let every `.grad` be its part of `flat`."""
        for param, grad in zip(self._params, self._views(flat)[1], strict=True):
            param.grad = grad

    def _views(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parts of `flat`, plain and as gradients of their parameters. Made once."""
        key = flat.data_ptr()
        if key not in self._views_of:
            parts = flat[: self.numel].split(self._sizes)
            views = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
            pairs = zip(self._params, views, strict=True)
            self._views_of[key] = (views, [as_gradient_of(p, v) for p, v in pairs])
        return self._views_of[key]
