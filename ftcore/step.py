"""One training step of one replica group: its shards, repeated until the step is committed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ftcore.deal import owners
from ftcore.guards import Objection
from ftcore.link import Grant

if TYPE_CHECKING:
    from ftcore.manager import Manager


@dataclass(slots=True)
class Shard:
    """One of the K parts of a step's global batch.

    step, index: which one; together with the run's seed they decide everything random in it.
    count: K, the same for the whole run. samples: ids of its samples, if the manager has `data`.
    """

    step: int
    index: int
    count: int
    samples: list[int] = field(default_factory=list)
    loss: torch.Tensor | None = None

    def log(self, loss: torch.Tensor) -> None:
        """Let `Step.loss` be the mean over all shards. `loss` has one element."""
        self.loss = loss.detach()


@dataclass(slots=True)
class Times:
    """Seconds that parts of the last attempt took, for metrics and the timeline."""

    group_s: float = 0.0
    heal_s: float = 0.0
    export_s: float = 0.0
    reduce_s: float = 0.0
    vote_s: float = 0.0
    held_s: float = 0.0  # by the heals of others


@dataclass(slots=True)
class Step:
    """Iterate over it to get this group's shards. When the loop ends the step is committed, every
    `.grad` holds the mean gradient over all K shards, and the optimizer may step.

    Shards may be handed out again, or of a later step: when a member is lost the step is repeated
    with the same samples, and a group that fell behind first copies the state of the others.
    """

    manager: Manager
    grant: Grant
    is_committed: bool = False
    is_prepared: bool = False
    failures: list[str] = field(default_factory=list)
    loss: float = float("nan")
    times: Times = field(default_factory=Times)
    objection: Objection | None = None  # of the guards, in this attempt

    @property
    def index(self) -> int:
        return self.grant.step

    @property
    def members(self) -> tuple[str, ...]:
        return self.grant.quorum.replica_ids

    @property
    def quorum_id(self) -> int:
        return self.grant.quorum.quorum_id

    def prepare(self) -> None:
        """Be in the step's quorum with its state. Done by the first iteration, if not before."""
        while not self.is_prepared:
            reason = self.manager.enter(self)
            self.is_prepared = not reason
            if reason:
                self._fail(reason)
            else:
                self.manager.watch.work_began()

    def __iter__(self) -> Iterator[Shard]:
        manager = self.manager
        while True:
            self.prepare()
            owner_of = owners(self.grant.quorum, step=self.index, shards=manager.shards)
            shards = 0
            for shard in manager.gradients.run(self, owner_of):
                yield shard
                shards += 1
            is_own_batch = manager.mode == "elastic" and not self.failures
            manager.watch.work_ended(shards=shards or int(is_own_batch))
            reason = manager.gradients.reduce(self, owner_of) or manager.refusal(self)
            if not reason:
                manager.settle(self, "")
                if self.is_committed:
                    return
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        """Vote no, unless another rank has done so, and wait until the step may be repeated."""
        if reason:
            self.manager.settle(self, reason)
        self.is_prepared, self.objection = False, None
        self.failures.append(reason)

    def samples_of(self, shard: int) -> list[int]:
        """The sample ids of one shard: a pure function of the committed position."""
        data = self.manager.data
        return [] if data is None else list(data.ledger.batches().samples[shard])

    def timed(self, part: str, began: float) -> None:
        setattr(self.times, part, time.perf_counter() - began)
