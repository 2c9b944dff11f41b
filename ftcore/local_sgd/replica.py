"""The outer copy of a model: what all replica groups agree on, fragment by fragment, flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ftcore.local_sgd.fragments import split_evenly
from ftcore.reduce.gradients import local_part


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD with Nesterov momentum on the averaged change of the parameters, as DiLoCo does it
    (Douillard et al. 2023, arXiv:2311.08105). rate 1 and momentum 0 is plain averaging."""

    rate: float = 0.7
    momentum: float = 0.9

    def step(self, outer: torch.Tensor, velocity: torch.Tensor, change: torch.Tensor) -> None:
        """Move `outer` against `change`, which is outer minus inner parameters, averaged."""
        if self.momentum == 0.0:
            outer.sub_(change, alpha=self.rate)
            return
        velocity.mul_(self.momentum).add_(change)
        outer.sub_(change.add(velocity, alpha=self.momentum), alpha=self.rate)


class Fragment:
    """Some parameters of the model, their outer copy and its velocity, both flat float32."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._sizes = [local_part(p).numel() for p in params]
        self.outer = self.inner()
        self.velocity = torch.zeros_like(self.outer)

    def inner(self) -> torch.Tensor:
        """This group's own parameters now, as a fresh flat tensor."""
        return torch.cat([local_part(p.detach()).reshape(-1).float() for p in self._params])

    def change(self) -> torch.Tensor:
        """Outer minus inner: the pseudo-gradient."""
        return self.outer - self.inner()

    def adopt(self, *, keep: float) -> None:
        """inner = keep × inner + (1 − keep) × outer."""
        with torch.no_grad():
            self._adopt(keep)

    def _adopt(self, keep: float) -> None:
        for param, part in zip(self._params, self.outer.split(self._sizes), strict=True):
            local = local_part(param)
            if keep:
                local.lerp_(part.view_as(local).to(local.dtype), 1 - keep)
            else:
                local.copy_(part.view_as(local))


def make_fragments(params: Mapping[str, torch.Tensor], parts: int) -> list[Fragment]:
    """Cut the parameters, in their order, into fragments of about the same size."""
    tensors = list(params.values())
    runs = split_evenly([local_part(t).numel() for t in tensors], parts)
    return [Fragment([tensors[i] for i in run]) for run in runs]
