"""Exact positions for data that can only be iterated: logical shards that a new owner replays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ftcore.data.errors import DataOrderDiffers


class ReplayShards:
    """`open_shard(shard, epoch)` gives the items of one of `shards` logical shards, in fixed order.

    Each committed step takes `per_shard` items of each shard, so every group knows how far every
    shard has come without being told. A new owner opens the shard and skips what is committed; if
    the iterable has `state_dict` and `load_state_dict` (StatefulDataLoader and the like) and a
    state of this shard is known here, it goes on from there and skips only the rest. A shard that
    ends begins its next epoch. With `lengths` (items of each shard) finished epochs are not read
    again.
    """

    def __init__(
        self,
        open_shard: Callable[[int, int], Iterable[Any]],
        *,
        shards: int,
        per_shard: int,
        lengths: Sequence[int] | None = None,
    ) -> None:
        if lengths is not None and (len(lengths) != shards or min(lengths, default=0) < 1):
            raise DataOrderDiffers(
                f"{len(lengths)} lengths are given for {shards} shards, or one is below 1",
                remedy="Give the number of items of each shard.",
            )
        self._open, self._shards, self._per_shard, self._lengths = (
            open_shard,
            shards,
            per_shard,
            lengths,
        )
        self.steps = 0
        self._streams: dict[int, _Stream] = {}
        self._held: dict[int, list[Any]] = {}
        self._states: dict[int, dict[str, Any]] = {}  # as of the last commit, of shards owned here

    def step(self, owned: Sequence[int]) -> dict[int, list[Any]]:
        """The items of this step for each owned shard; the same again until it is committed."""
        for shard in [shard for shard in self._streams if shard not in owned]:
            del self._streams[shard]
            self._held.pop(shard, None)
        for shard in owned:
            if shard not in self._streams:
                self._streams[shard] = self._stream(shard)
            if shard not in self._held:
                self._held[shard] = list(islice(self._streams[shard], self._per_shard))
        return {shard: self._held[shard] for shard in owned}

    def commit(self) -> None:
        """The step is committed: all shards have moved on, also those owned elsewhere."""
        for shard in range(self._shards):
            if shard in self._streams and shard not in self._held:
                del self._streams[shard]  # it was not read in this step: it is behind now
        self._held.clear()
        self.steps += 1
        self._states = {s: stream.state() for s, stream in self._streams.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "shards": self._shards,
            "per_shard": self._per_shard,
            "states": dict(self._states),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, here in (("shards", self._shards), ("per_shard", self._per_shard)):
            if state[name] != here:
                raise DataOrderDiffers(
                    f"the position was made with {name} {state[name]}, this run has {name} {here}"
                )
        self.steps = int(state["steps"])
        self._states = dict(state["states"])
        self._streams.clear()
        self._held.clear()

    def _stream(self, shard: int) -> _Stream:
        target = self.steps * self._per_shard
        known = self._states.get(shard)
        if known is not None and known["taken"] <= target:
            stream = _Stream(self._open, shard, known["epoch"], known["taken"], known["inner"])
        elif self._lengths is not None:
            epoch = target // self._lengths[shard]
            stream = _Stream(self._open, shard, epoch, epoch * self._lengths[shard])
        else:
            stream = _Stream(self._open, shard, 0, 0)
        for _ in islice(stream, target - stream.taken):
            pass
        return stream


class _Stream:
    """The items of one shard over all its epochs, counted."""

    def __init__(
        self,
        open_shard: Callable[[int, int], Iterable[Any]],
        shard: int,
        epoch: int,
        taken: int,
        inner: Any = None,
    ) -> None:
        self._open, self._shard, self._epoch, self.taken = open_shard, shard, epoch, taken
        self._source = open_shard(shard, epoch)
        self._skipped = 0
        if inner is not None and hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict(inner["state"])
        elif inner is not None:
            self._skipped = inner["read"]
        self._read = inner["read"] if inner is not None else 0
        self._items = iter(self._source)
        for _ in islice(self._items, self._skipped):
            pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            for item in self._items:
                self.taken, self._read = self.taken + 1, self._read + 1
                return item
            self._epoch, self._read = self._epoch + 1, 0
            self._source = self._open(self._shard, self._epoch)
            self._items = iter(self._source)
        raise DataOrderDiffers(
            f"shard {self._shard} has no items in epoch {self._epoch}",
            remedy="Give every logical shard at least one item.",
        )

    def state(self) -> dict[str, Any]:
        has_state = hasattr(self._source, "state_dict")
        state = self._source.state_dict() if has_state else None  # type: ignore[attr-defined]
        inner = {"read": self._read, "state": state}
        return {"taken": self.taken, "epoch": self._epoch, "inner": inner}
