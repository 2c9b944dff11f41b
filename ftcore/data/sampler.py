"""Samplers for an ordinary torch DataLoader that keep the exact position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

from torch.utils.data import Sampler

from ftcore.data.ledger import EpochEnd, Ledger


class ElasticSampler(Sampler[int]):  # type: ignore[misc]
    """Sample ids of the shards owned here, from the committed position to the end of the epoch.

    The loop calls `commit()` when a step is committed; iterating changes nothing. Set `owned`
    when the membership changes and iterate anew. `state_dict` is the position alone.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        seed: int = 0,
        shards: int = 1,
        per_shard: int = 1,
        owned: Sequence[int] | None = None,
        epoch_end: EpochEnd | str = EpochEnd.FLOW,
    ) -> None:
        self.ledger = Ledger(
            size=data if isinstance(data, int) else len(data),
            seed=seed,
            shards=shards,
            per_shard=per_shard,
            epoch_end=EpochEnd(epoch_end),
        )
        self.owned: tuple[int, ...] = tuple(range(shards) if owned is None else owned)

    def __iter__(self) -> Iterator[int]:
        for _, samples in self.batches():
            yield from samples

    def batches(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(shard, samples) for each owned shard of each step that begins in this epoch."""
        end = (self.ledger.epoch + 1) * self.ledger.size
        owned, ahead = self.owned, replace(self.ledger)
        while ahead.position < end:
            step = ahead.batches()
            for shard in owned:
                if step.samples[shard]:
                    yield shard, step.samples[shard]
            ahead.commit()

    def __len__(self) -> int:
        """Samples left in this epoch for the owned shards, when every step is full."""
        left = (self.ledger.epoch + 1) * self.ledger.size - self.ledger.position
        steps = -(-left // self.ledger.per_step)
        return steps * self.ledger.per_shard * len(self.owned)

    def commit(self) -> int:
        return self.ledger.commit()

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ledger.load_state_dict(state)


class ElasticBatchSampler(Sampler[list[int]]):  # type: ignore[misc]
    """One list for each owned shard of each step: `DataLoader(data, batch_sampler=…)`."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return (list(samples) for _, samples in self.sampler.batches())

    def __len__(self) -> int:
        return sum(1 for _ in self.sampler.batches())
