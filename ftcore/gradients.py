"""Compute and reduce the gradients of one step, exactly (shard by shard) or fast (all-reduce)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ftcore.data.rng import shard_rng
from ftcore.guard_watch import Reduced
from ftcore.process_group.base import Group
from ftcore.process_group.errors import GroupError
from ftcore.reduce.buckets import Buckets
from ftcore.reduce.gradients import local_part
from ftcore.step import Shard, Step

if TYPE_CHECKING:
    from ftcore.live_state import LiveState


class Gradients(Reduced, Protocol):
    """What a Step needs: hand out the shards that `owner_of` gives this rank, then reduce."""

    def run(self, step: Step, owner_of: Sequence[int]) -> Iterator[Shard]: ...

    def reduce(self, step: Step, owner_of: Sequence[int]) -> str:
        """Return why the reduction failed, or an empty string."""

    def attach(self, state: LiveState) -> None:
        """Register what has to heal beside model and optimizer."""

    def doubt(self) -> None:
        """A guard refused the result: what can be computed again has to be."""

    def committed(self) -> None:
        """The step is committed. `.grad` stays for the optimizer, what was kept may go."""

    def forget(self) -> None:
        """The state changed: what was kept is worth nothing now."""


class Reducer:
    """What all modes share: buckets, the loss beside them, errors as reasons."""

    def __init__(self, model: torch.nn.Module, group: Group, *, seed: int) -> None:
        # The loss travels as the gradient of one more parameter.
        device = next(model.parameters()).device
        self._loss = torch.zeros(1, device=device, requires_grad=True)
        self._own_loss: torch.Tensor | None = None
        self._named = list(model.named_parameters())
        named = [("ftcore.loss", self._loss), *self._named]
        self._buckets = Buckets(named)
        self._params = [param for _, param in named if param.requires_grad]
        self._group = group
        self._seed = seed

    def _mine(self, owner_of: Sequence[int]) -> list[int]:
        return [shard for shard, owner in enumerate(owner_of) if owner == self._group.rank()]

    def _bring_nothing(self) -> None:
        """A rank without a part in this step, such as a healing one, adds zeros."""
        for param in self._params:
            param.grad = torch.zeros_like(param)

    def _one(self, step: Step, index: int, count: int) -> Iterator[Shard]:
        """Hand out one shard with its own random numbers, then note its loss."""
        shard = Shard(step=step.index, index=index, count=count, samples=step.samples_of(index))
        with shard_rng(self._seed, step.index, index):
            yield shard
        loss = torch.zeros(1, device=self._loss.device)
        if shard.loss is not None:
            loss += shard.loss.to(loss.dtype)
        self._loss.grad = loss if self._loss.grad is None else self._loss.grad + loss

    def reduce(self, step: Step, owner_of: Sequence[int]) -> str:
        began = time.perf_counter()
        self._own_loss = self._loss.grad
        try:
            self._reduce(step, owner_of)
            self._group.settle()
        except GroupError as error:
            return str(error)
        step.timed("reduce_s", began)
        assert self._loss.grad is not None
        step.loss = float(self._loss.grad)
        self._loss.grad = None
        return ""

    def _reduce(self, step: Step, owner_of: Sequence[int]) -> None:
        raise NotImplementedError

    def norm(self) -> float:
        grads = [local_part(p.grad) for p in self._params if p is not self._loss]
        norms = [norm.float() for norm in torch._foreach_norm(grads)]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def own_is_finite(self) -> bool:
        return self._own_loss is None or bool(self._own_loss.isfinite())

    def compared(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._named

    def attach(self, state: LiveState) -> None:
        return

    def doubt(self) -> None:
        return

    def committed(self) -> None:
        return

    def forget(self) -> None:
        self._buckets.clear()


class ExactGradients(Reducer):
    """Each shard's gradients are kept until the step commits, and summed in shard order: the bits
    do not depend on who computed what, and a repeated step computes only what is missing."""

    def run(self, step: Step, owner_of: Sequence[int]) -> Iterator[Shard]:
        for index in self._mine(owner_of):
            if index not in self._buckets.shards:
                with self._buckets.shard(index):
                    yield from self._one(step, index, len(owner_of))

    def _reduce(self, step: Step, owner_of: Sequence[int]) -> None:
        self._buckets.reduce_exact(self._group, owner_of=owner_of, scale=1 / len(owner_of))

    def own_is_finite(self) -> bool:
        return self._buckets.shards_are_finite()

    def doubt(self) -> None:
        self._buckets.forget_shards()

    def committed(self) -> None:
        self._buckets.forget_shards()

    def forget(self) -> None:
        super().forget()
        self._buckets.forget_shards()


class FastGradients(Reducer):
    """Gradients add up over this rank's shards as backward makes them, then one all-reduce per
    bucket, started while the last backward still runs."""

    def run(self, step: Step, owner_of: Sequence[int]) -> Iterator[Shard]:
        self._buckets.clear()
        mine = self._mine(owner_of)
        if not mine:
            self._bring_nothing()
        for index in mine:
            if index == mine[-1]:
                self._buckets.arm(self._group, weight=1 / len(owner_of), backwards=None)
            yield from self._one(step, index, len(owner_of))

    def _reduce(self, step: Step, owner_of: Sequence[int]) -> None:
        self._buckets.reduce_fast(self._group, weight=1 / len(owner_of))
