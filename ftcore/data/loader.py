"""Load the batches of the owned shards ahead of the step, and drop them when the owners change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset

from ftcore.data.ledger import Ledger
from ftcore.data.rng import seeded
from ftcore.data.seeds import seed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBatch:
    """The batch of one shard in one step, and the seed for the shard's random numbers."""

    shard: int
    position: int
    count: int
    seed: int
    data: Any


class _Request(list[int]):
    """Sample ids on their way to a worker, with what names their batch."""

    def __init__(self, samples: Sequence[int], shard: int, position: int, seed: int) -> None:
        super().__init__(samples)
        self.shard, self.position, self.seed = shard, position, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _Request, (list(self), self.shard, self.position, self.seed)


class _Seeded(Dataset[Any]):  # type: ignore[misc]
    """Reads samples under the seed of their batch, so that augmentation does not depend on which
    worker of which group reads them."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitems__(self, request: _Request) -> list[Any]:
        with seeded(request.seed):
            if hasattr(self.data, "__getitems__"):
                return list(self.data.__getitems__(list(request)))
            return [self.data[i] for i in request]


class ElasticLoader:
    """`for part in loader.step(owned): …`, then `loader.commit()`; not committed, `step` repeats.

    `options` go to `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, …). Workers
    run ahead of the step; what they loaded is dropped and loaded anew from the committed position
    when `owned` changes, except the batches of this very step that stay here. The seed of a batch
    is `seed_for(seed, position, shard)`: of the sampled data, not of the try.
    """

    def __init__(self, data: Any, ledger: Ledger, **options: Any) -> None:
        self.ledger = ledger
        if options.get("num_workers"):
            options.setdefault("persistent_workers", True)
        self._requests: Iterator[_Request] = iter(())
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(data), batch_sampler=_Requests(self), **options
        )
        self._iterator: Iterator[Any] | None = None
        self._expected: deque[_Request] = deque()
        self._owned: tuple[int, ...] = ()
        self._held: dict[tuple[int, int], ShardBatch] = {}  # of this step, by (position, shard)

    def step(self, owned: Sequence[int]) -> list[ShardBatch]:
        """The batches of this step for the owned shards, in shard order, without empty ones."""
        if tuple(owned) != self._owned or self._iterator is None:
            self._restart(tuple(owned))
        batches = self.ledger.batches()
        wanted = [(batches.position, shard) for shard in owned if batches.samples[shard]]
        for key in wanted:
            if key not in self._held:
                self._held[key] = self._next(key)
        return [self._held[key] for key in wanted]

    def commit(self) -> int:
        """The step is committed: its batches are let go. Returns the new position."""
        position = self.ledger.commit()
        self._held = {key: batch for key, batch in self._held.items() if key[0] >= position}
        return position

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ledger.load_state_dict(state)
        self._iterator = None
        self._held.clear()

    def _restart(self, owned: tuple[int, ...]) -> None:
        """Forget what workers have loaded ahead, keep what of this step is still ours."""
        self._owned = owned
        self._expected.clear()
        self._requests = self._run_ahead(owned, frozenset(self._held))
        self._iterator = iter(self._loader)

    def _run_ahead(
        self, owned: Sequence[int], held: frozenset[tuple[int, int]]
    ) -> Iterator[_Request]:
        ahead = replace(self.ledger)
        while owned:
            step = ahead.batches()
            for shard in owned:
                if step.samples[shard] and (step.position, shard) not in held:
                    seed = seed_for(ahead.seed, step.position, shard)
                    yield _Request(step.samples[shard], shard, step.position, seed)
            ahead.commit()

    def _next(self, key: tuple[int, int]) -> ShardBatch:
        assert self._iterator is not None, "step() starts the iterator"
        data = next(self._iterator)
        request = self._expected.popleft()
        assert (request.position, request.shard) == key, "workers answer in the order asked"
        return ShardBatch(
            shard=request.shard,
            position=request.position,
            count=len(request),
            seed=request.seed,
            data=data,
        )


class _Requests:
    """The batch sampler of the inner DataLoader: remembers what it has handed out."""

    def __init__(self, owner: ElasticLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[_Request]:
        expected = self._owner._expected
        for request in self._owner._requests:
            expected.append(request)
            yield request
