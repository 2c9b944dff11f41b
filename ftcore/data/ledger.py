"""Keep the position in the data: what is committed, what the next step takes, who takes it.

The only state is the number of samples committed. All else is a pure function of it, so groups
that agree on the position agree on every sample, however many they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from ftcore.data.errors import DataOrderDiffers
from ftcore.data.order import Permutation

LATEST_MAX = 4  # steps whose samples are remembered: callers ask once for each shard

Participant = TypeVar("Participant", bound=Hashable)


class EpochEnd(Enum):
    """What happens when an epoch does not fill its last step. No sample is lost or seen twice."""

    FLOW = "flow"  # the step takes its rest from the next epoch: every step has the same size
    SHORT = "short"  # the last step of an epoch is smaller: an epoch begins with a new step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What one step takes: `samples[k]` are the sample ids of shard k."""

    position: int
    samples: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.samples))


@dataclass(kw_only=True)
class Ledger:
    """The position in a data set of `size` samples, of which each step takes `per_shard` for each
    of `shards` shards.

    A step that is not committed is repeated by asking again: `batches()` changes nothing.
    """

    size: int
    seed: int = 0
    shards: int = 1
    per_shard: int = 1
    epoch_end: EpochEnd = EpochEnd.FLOW
    position: int = field(default=0)  # samples committed, over all epochs
    _latest: dict[int, Batches] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("size", "shards", "per_shard"):
            if getattr(self, name) < 1:
                raise DataOrderDiffers(
                    f"{name} is {getattr(self, name)}", remedy=f"Give a {name} of at least 1."
                )

    @cached_property
    def per_step(self) -> int:
        """Samples of a full step, over all shards: the global batch."""
        return self.shards * self.per_shard

    @property
    def epoch(self) -> int:
        return self.position // self.size

    def batches(self, ahead: int = 0) -> Batches:
        """What the next step takes, or the step `ahead` steps after it when all are committed."""
        position = self.position
        for _ in range(ahead):
            position += self._count(position)
        if position not in self._latest:
            if len(self._latest) >= LATEST_MAX:
                self._latest.pop(next(iter(self._latest)))
            self._latest[position] = self._batches_at(position)
        return self._latest[position]

    def commit(self) -> int:
        """The step is committed: move on. Returns the new position."""
        self.position += self._count(self.position)
        return self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position. Shards and batch may have changed since, seed and size may not."""
        for name in ("size", "seed"):
            if state[name] != getattr(self, name):
                raise DataOrderDiffers(
                    f"the position was made with {name} {state[name]}, this run has {name} "
                    f"{getattr(self, name)}"
                )
        self.position = int(state["position"])

    def _count(self, position: int) -> int:
        left = self.size - position % self.size
        return min(self.per_step, left) if self.epoch_end is EpochEnd.SHORT else self.per_step

    def _batches_at(self, position: int) -> Batches:
        count = self._count(position)
        ids = [self.sample_at(position + i) for i in range(count)]
        if count == self.per_step:
            cuts = [k * self.per_shard for k in range(self.shards + 1)]
        else:  # a short step is spread evenly, so that no shard idles needlessly
            cuts = [k * count // self.shards for k in range(self.shards + 1)]
        shards = tuple(tuple(ids[cuts[k] : cuts[k + 1]]) for k in range(self.shards))
        return Batches(position=position, samples=shards)

    def sample_at(self, position: int) -> int:
        """The id of the sample at a position of the stream of all epochs."""
        epoch, index = divmod(position, self.size)
        return permutation(self.seed, epoch, self.size)[index]


permutation = lru_cache(maxsize=8)(Permutation)


def deal(*, shards: int, participants: Sequence[Participant]) -> tuple[Participant, ...]:
    """The owner of each shard: neighbouring shards together, loads that differ by at most one.

    A pure function of the participants in their order, so that all groups deal alike. With more
    participants than shards some own none.
    """
    if not participants:
        raise ValueError("shards cannot be dealt to nobody")
    count = len(participants)
    return tuple(participants[shard * count // max(shards, count)] for shard in range(shards))


def owned_by(owner: Hashable, owners: Sequence[Hashable]) -> tuple[int, ...]:
    """The shards that `deal` gave to `owner`, in order."""
    return tuple(shard for shard, each in enumerate(owners) if each == owner)
