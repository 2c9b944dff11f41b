"""Loops that stay as they are: each group brings its own batch, and the optimizer is wrapped.

    optimizer = ftcore.wrap(model, optimizer, steps=1000)
    while not optimizer.is_done:
        optimizer.zero_grad()              # waits for the quorum, heals if this group is new
        loss = f(model(next(batches)))
        loss.backward()
        optimizer.step()                   # averages over the groups, votes, repeats, then steps

A step that fails is repeated with the gradients that are here: nothing of this group is computed
again or lost. What a dead group had not brought yet is not in the step, so the global batch is that
of the living. Use Manager with `for shard in step` where batch and samples must be exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ftcore.deal import contributors
from ftcore.gradients import Reducer
from ftcore.step import Shard, Step


class ElasticGradients(Reducer):
    """The mean of the gradients that the members of the quorum bring."""

    _kept: list[torch.Tensor | None] | None = None

    def run(self, step: Step, owner_of: Sequence[int]) -> Iterator[Shard]:
        """Keep what backward has made, or bring it again for a repeated step."""
        if self._kept is None:
            self._kept = [p.grad.clone() if p.grad is not None else None for p in self._params]
        if self._group.rank() in contributors(step.grant.quorum, step=step.index):
            for param, kept in zip(self._params, self._kept, strict=True):
                param.grad = kept.clone() if kept is not None else None
        else:
            self._bring_nothing()
        yield from ()

    def _reduce(self, step: Step, owner_of: Sequence[int]) -> None:
        count = len(contributors(step.grant.quorum, step=step.index))
        if self._loss.grad is None:
            self._loss.grad = torch.zeros_like(self._loss)
        self._buckets.reduce_fast(self._group, weight=1 / count)

    def own_is_finite(self) -> bool:
        return all(kept is None or bool(kept.isfinite().all()) for kept in self._kept or ())

    def committed(self) -> None:
        self._kept = None

    def forget(self) -> None:
        """The state was healed after backward: these gradients are of another state."""
        if self._kept is not None:
            self._kept = [None for _ in self._kept]


class WrappedOptimizer:
    """An optimizer whose step is the step of all groups. Everything else is the wrapped one's."""

    def __init__(self, manager: Any, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
        self.manager = manager
        self._optimizer = optimizer
        self._steps = manager.steps(steps)
        self._step: Step | None = None
        self.is_done = False
        self._next()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: be in the quorum, with its state. Leaves zeroed gradients."""
        if self._step is not None:
            self._step.prepare()
        self._optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Average, vote, repeat while groups fail, then step. Sets `is_done` after the last."""
        if self._step is None:
            return
        for _ in self._step:
            raise AssertionError("elastic steps have no shards")
        self._optimizer.step()
        self._next()

    @property
    def index(self) -> int:
        """The step that runs now."""
        return self._step.index if self._step is not None else int(self.manager.until)

    def _next(self) -> None:
        self._step = next(self._steps, None)
        self.is_done = self._step is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def wrap(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, **options: Any
) -> WrappedOptimizer:
    """Make an existing loop fault tolerant; `options` are those of ftcore.Manager."""
    from ftcore.manager import Manager

    manager = Manager(model, optimizer, mode="elastic", **options)
    return WrappedOptimizer(manager, optimizer, steps=steps)
