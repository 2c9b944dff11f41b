"""LocalSGD and (streaming) DiLoCo as steps of a Manager: inner steps alone, then an outer step.

    manager = ftcore.Manager(model, optimizer, gradients=DiLoCo(sync_every=100))
    for step in manager.steps(outer_steps):
        for inner in step:                   # this group's inner steps
            loss = loss_of(model(batch(inner.step, inner.index)))
            loss.backward(); optimizer.step(); optimizer.zero_grad()

When the inner loop ends the outer step is committed. A death in mid-interval stops nobody: the
others' inner steps go on, and the outer step is repeated with what the survivors have. A joiner
copies outer parameters, velocity and model, brings nothing to the outer step it arrives in, and has
the same outer parameters as all after it. Lost is only what a dead group did since its last outer
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftcore.base.errors import BadSetting
from ftcore.local_sgd.fragments import Schedule
from ftcore.local_sgd.outer_reduce import Averaging, start_average
from ftcore.local_sgd.quantize import BLOCK, Kind
from ftcore.local_sgd.replica import OuterOptimizer, make_fragments
from ftcore.process_group.base import Group
from ftcore.process_group.errors import GroupError
from ftcore.step import Shard, Step

if TYPE_CHECKING:
    from ftcore.live_state import LiveState


class OuterSteps:
    """What a Manager needs instead of gradient reduction. `keep` is the part of its own parameters
    that a group keeps when it adopts the outer ones: 0 makes all groups equal."""

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        group: Group,
        *,
        schedule: Schedule,
        optimizer: OuterOptimizer,
        quantize: Kind | None = None,
        keep: float = 0.0,
    ) -> None:
        if not 0.0 <= keep < 1.0:
            raise BadSetting(f"keep is {keep}, but must be at least 0 and below 1")
        self.schedule, self.optimizer = schedule, optimizer
        self.quantize, self.keep = quantize, keep
        self.fragments = make_fragments(params, schedule.fragments)
        self._group = group
        self._before_update: Callable[[], None] = lambda: None
        self._inner_done = 0
        self._losses: list[torch.Tensor] = []
        self._change: torch.Tensor | None = None
        self._averaged: torch.Tensor | None = None
        self._running: Averaging | None = None
        self._fragment = 0

    def attach(self, state: LiveState) -> None:
        state.register("outer", self.get_state, self.set_state)
        self._before_update = state.before_update  # what a joiner still reads is copied aside

    # What a Step calls

    def run(self, step: Step, owner_of: Sequence[int]) -> Iterator[Shard]:
        """Hand out the inner steps not yet done; start the reduction `delay` steps before the end.
        A group that heals in this step brings nothing, so it does none: nobody waits for it."""
        self._running = None  # a sum that the vote refused is added up again, by all
        self._fragment = self.schedule.fragment_of(step.index)
        if self._group.rank() not in _givers(step):
            return
        while self._inner_done < self.schedule.inner_steps:
            self._overlap(step)
            shard = self._inner(step)
            yield shard
            if shard.loss is not None:
                self._losses.append(shard.loss.float().reshape(1))
            self._inner_done += 1

    def _inner(self, step: Step) -> Shard:
        number = step.index * self.schedule.inner_steps + self._inner_done
        return Shard(step=number, index=self._group.rank(), count=self._group.size())

    def _overlap(self, step: Step) -> None:
        """Errors show at the end of the step: nothing is to be done about them before."""
        left, delay = self.schedule.inner_steps - self._inner_done, self.schedule.delay
        with suppress(GroupError):
            if delay and left == delay and self._change is None:
                self._start(step)
            elif delay > 1 and left == delay // 2 and self._running is not None:
                self._running.gather()

    def _start(self, step: Step) -> None:
        fragment, givers = self.fragments[self._fragment], _givers(step)
        gives = self._group.rank() in givers
        if gives and self._change is None:
            self._change = _with_loss(fragment.change(), self._mean_loss())
        self._averaged = torch.empty_like(_with_loss(fragment.outer, self._mean_loss()))
        change = self._change if gives else None
        self._running = start_average(
            self._group, change, givers=givers, out=self._averaged, quantize=self.quantize
        )

    def _mean_loss(self) -> torch.Tensor:
        if not self._losses:
            return torch.zeros(1, device=self.fragments[0].outer.device)
        return torch.stack(self._losses).mean(0)

    def reduce(self, step: Step, owner_of: Sequence[int]) -> str:
        """Average the change of this step's fragment. Returns why it failed, or nothing.

        A repeated step averages the same change again: the inner steps are not repeated.
        """
        began = time.perf_counter()
        try:
            if self._running is None:
                self._start(step)
            assert self._running is not None and self._averaged is not None
            self._running.gather()
            self._running.wait()
            self._group.settle()
        except GroupError as error:
            self._running = None
            return str(error)
        step.timed("reduce_s", began)
        step.loss = float(self._averaged[-1])
        return ""

    def norm(self) -> float:
        """Of the averaged change."""
        assert self._averaged is not None
        return float(torch.linalg.vector_norm(self._averaged[:-1]))

    def own_is_finite(self) -> bool:
        return self._change is None or bool(self._change.isfinite().all())

    def compared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What all groups hold in common: their own parameters differ between outer steps."""
        for number, fragment in enumerate(self.fragments):
            yield f"outer.{number}", fragment.outer
            yield f"velocity.{number}", fragment.velocity

    def doubt(self) -> None:
        """The inner steps are done: their change is averaged again."""

    def committed(self) -> None:
        """Apply the outer step. The averaged change has the same bits everywhere, so has the
        result."""
        assert self._averaged is not None
        fragment = self.fragments[self._fragment]
        self._before_update()
        change = self._averaged[: fragment.outer.numel()]
        self.optimizer.step(fragment.outer, fragment.velocity, change)
        fragment.adopt(keep=self.keep)
        self.forget()

    def forget(self) -> None:
        """Inner steps start anew: after a commit, or when the state was copied from others."""
        self._inner_done = 0
        self._losses = []
        self._change = self._averaged = self._running = None

    # State

    def get_state(self) -> dict[str, Any]:
        return {
            "outer": [f.outer for f in self.fragments],
            "velocity": [f.velocity for f in self.fragments],
        }

    def set_state(self, state: Any) -> None:
        for fragment, outer, velocity in zip(
            self.fragments, state["outer"], state["velocity"], strict=True
        ):
            fragment.outer.copy_(outer)
            fragment.velocity.copy_(velocity)


def _givers(step: Step) -> list[int]:
    """The replica ranks that bring a change: all but those that heal in this very step."""
    quorum = step.grant.quorum
    healing = quorum.healing if step.index == quorum.from_step else frozenset()
    return [rank for rank, name in enumerate(quorum.replica_ids) if name not in healing]


def _with_loss(flat: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """The loss travels at the end, in a block of its own: no parameter shares its scale."""
    return torch.cat([flat, flat.new_zeros(-flat.numel() % BLOCK), loss])


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Make the manager's steps outer steps of DiLoCo (arXiv:2311.08105), or of its streaming form
    (arXiv:2501.18512) with several fragments and a delay: `Manager(..., gradients=DiLoCo(...))`.

    sync_every: inner steps between two outer steps of the same parameters.
    fragments: parts of the model that take turns; a step of the manager is one part's outer step.
    delay: inner steps that overlap with the reduction. What they changed in the part is lost
        unless `keep` (0 to 1) keeps a share of it; with 0 all groups are equal after each turn.
    quantize: "int8" or "fp8" moves about a quarter of the bytes.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0
    quantize: Kind | None = None
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    keep: float = 0.0

    def __call__(self, model: torch.nn.Module, group: Group, *, seed: int = 0) -> OuterSteps:
        """Called by the Manager."""
        return OuterSteps(
            {name: p for name, p in model.named_parameters() if p.requires_grad},
            group,
            schedule=Schedule(
                sync_every=self.sync_every, fragments=self.fragments, delay=self.delay
            ),
            optimizer=OuterOptimizer(rate=self.outer_rate, momentum=self.outer_momentum),
            quantize=self.quantize,
            keep=self.keep,
        )


def local_sgd(*, sync_every: int, quantize: Kind | None = None) -> DiLoCo:
    """Average the parameters of all groups every `sync_every` inner steps."""
    return DiLoCo(sync_every=sync_every, quantize=quantize, outer_rate=1.0, outer_momentum=0.0)
