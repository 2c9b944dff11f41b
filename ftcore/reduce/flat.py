"""One flat bucket: gradients are copied in unless they lie there already, and shown as views."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ftcore.reduce.gradients import as_gradient_of, local_gradient, local_part
from ftcore.reduce.layout import BucketPlan, Slot


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
        self._filled_from: list[tuple[torch.Tensor, int]] = []
        self._workspace: torch.Tensor | None = None
        self.flat = self._new_flat()

    def _new_flat(self) -> torch.Tensor:
        like = local_part(self._params[0])
        return torch.zeros(max(self.numel, 1), dtype=like.dtype, device=like.device)

    def of_shard(self, shard: int) -> torch.Tensor:
        if shard not in self.shards:
            self.shards[shard] = self._spare.pop() if self._spare else self._new_flat()
        return self.shards[shard]

    def forget_shards(self) -> None:
        self._spare += self.shards.values()
        self.shards = {}

    def workspace(self, shards: int, world_size: int) -> torch.Tensor:
        """A tensor for the slices of all shards that arrive at one rank. Kept and reused."""
        numel = shards * (self.numel // world_size + 1)
        if self._workspace is None or self._workspace.numel() < numel:
            self._workspace = self.flat.new_empty(numel)
        return self._workspace

    def fill(self, flat: torch.Tensor, *, weight: float = 1.0) -> list[str]:
        """Bring weight × each gradient into `flat`. Returns the names of parameters without one."""
        views, shown = self._views(flat)
        targets, sources, missing = [], [], []
        for name, param, view, grad in zip(self.names, self._params, views, shown, strict=True):
            source = view if param.grad is grad else local_gradient(param, name=name)
            if source is None or weight == 0.0:
                view.zero_()
            if source is None:
                missing.append(name)
            elif weight != 0.0 and not (weight == 1.0 and source is view):
                targets.append(view)
                sources.append(source)
        _scale_into(targets, sources, weight)
        # Gradients that lie in the bucket share one version with it, so they cannot be watched.
        inside = {view.data_ptr() for view in views}
        outside = [source for source in sources if source.data_ptr() not in inside]
        self._filled_from = [(source, source._version) for source in outside]
        return missing

    def changed_since_filled(self) -> bool:
        """Whether somebody scaled or clipped a gradient after it was taken."""
        return any(source._version != version for source, version in self._filled_from)

    def show(self, flat: torch.Tensor) -> None:
        """Let every `.grad` be its part of `flat`."""
        self._filled_from = []
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


def _scale_into(targets: list[torch.Tensor], sources: list[torch.Tensor], weight: float) -> None:
    """One pass over the memory, whether the gradient lies in the bucket already or not."""
    if weight == 1.0 and targets:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        torch.mul(source, weight, out=target)
