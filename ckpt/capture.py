"""Take hold of a live state: its tensors by reference, its plain values, and its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.boxes import Box
from ckpt.collector import collector_paused
from ckpt.plan import Item, Layout, Share, plan
from ckpt.recipe import Changed, Recipe
from ftcore.statedict import FlatState, PerRank, flatten
from ftcore.statedict.entries import Entry

try:
    from torch.distributed.tensor import DTensor, Replicate
except ImportError:
    DTensor = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which participant of a save this process is. Groups are replicas of each other."""

    rank: int = 0
    ranks: int = 1
    group: int = 0
    groups: int = 1

    @property
    def index(self) -> int:
        return self.group * self.ranks + self.rank

    @property
    def count(self) -> int:
        return self.ranks * self.groups


Cut = tuple[tuple[int, int, int], ...]  # (dimension, start, length) of a part of a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A layout, and where each member of its files comes from: an entry, whole or cut."""

    entries: tuple[Entry, ...]
    layout: Layout
    sources: tuple[tuple[tuple[int, Cut | None], ...], ...]
    copies: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A state at one moment. `tensors` are live until they are staged, in order of the entries."""

    planned: Planned
    tensors: Sequence[torch.Tensor]
    plain: bytes

    @property
    def layout(self) -> Layout:
        return self.planned.layout

    def names(self) -> list[str]:
        return [entry.name for entry in self.planned.entries]

    def sources(self, file: int) -> list[torch.Tensor]:
        """The live parts of tensors that belong into a file, one for each member."""
        tensors = self.tensors
        return [
            tensors[index] if cut is None else _cut(tensors[index], cut)
            for index, cut in self.planned.sources[file]
        ]


def _cut(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    with torch.no_grad():
        for dim, start, length in cut:
            tensor = tensor.narrow(dim, start, length)
    return tensor


class Planner:
    """Captures states. A state of the same shape as the last one is only read; a state with the
    same entries is not planned again."""

    def __init__(
        self, *, resident_bytes_max: int | None = None, wave_bytes: int | None = None
    ) -> None:
        self._place = Place()
        self._resident_bytes_max, self._wave_bytes = resident_bytes_max, wave_bytes
        self._planned: Planned | None = None
        self._recipe: Recipe | None = None
        self.plans = 0

    def capture(self, state: Mapping[str, Any], place: Place) -> Captured:
        if place != self._place:
            self._place, self._planned, self._recipe = place, None, None
        ranked = with_ranks(state, place)
        with collector_paused():
            return self._read_again(ranked) or self._capture_anew(ranked)

    def capture_pure(self, state: Mapping[str, Any], place: Place) -> Captured | None:
        """The same, if the state consists of containers that were seen before."""
        if self._recipe is None or not self._recipe.is_pure or place != self._place:
            return None
        return self._read_again(with_ranks(state, place))

    def _read_again(self, ranked: Mapping[str, Any]) -> Captured | None:
        if self._recipe is not None and self._planned is not None:
            try:
                tensors, plain = self._recipe.read(ranked)
            except Changed:
                self._recipe = None
            else:
                return Captured(planned=self._planned, tensors=tensors, plain=plain)
        return None

    def _capture_anew(self, ranked: Mapping[str, Any]) -> Captured:
        flat = flatten(ranked)
        entries = tuple(t.entry for t in flat.tensors)
        if self._planned is None or entries != self._planned.entries:
            self._planned = self._plan(flat, entries)
        try:
            self._recipe = Recipe(ranked, flat)
        except Changed:
            self._recipe = None
        tensors = [t.tensor for t in flat.tensors]
        return Captured(planned=self._planned, tensors=tensors, plain=flat.plain)

    def _plan(self, flat: FlatState, entries: tuple[Entry, ...]) -> Planned:
        self.plans += 1
        owners = _outer_tensors(flat)
        copies: dict[str, int] = {}
        items = []
        for entry in entries:
            if entry.alias_of is not None or _is_empty_shard(entry):
                continue
            share, copy = self._share(entry, owners.get(entry.name))
            copies[share.label] = copy
            items.append(Item(entry.name, entry.dtype, entry.global_shape, box_of(entry), share))
        aliases = [(e.name, e.alias_of) for e in entries if e.alias_of is not None]
        layout = plan(items, aliases=aliases)
        limit = self._resident_bytes_max
        if limit is not None and layout.pool_bytes > limit:
            layout = plan(items, aliases=aliases, file_bytes_max=self._wave_bytes)
        return Planned(
            entries=entries, layout=layout, sources=_sources(layout, entries), copies=copies
        )

    def _share(self, entry: Entry, outer: torch.Tensor | None) -> tuple[Share, int]:
        place = self._place
        if DTensor is not None and isinstance(outer, DTensor):
            count, copy = _replicas(outer)
            label = f"{tuple(outer.device_mesh.shape)}{outer.placements}/{place.groups}"
            return Share(label, count * place.groups), copy + count * place.group
        if _is_own(entry.name, place):
            return Share(f"own/{place.groups}", place.groups), place.group
        return Share(f"all/{place.count}", place.count), place.index


def _sources(
    layout: Layout, entries: Sequence[Entry]
) -> tuple[tuple[tuple[int, Cut | None], ...], ...]:
    at = {entry.name: (i, box_of(entry)) for i, entry in enumerate(entries)}

    def source(item: Item) -> tuple[int, Cut | None]:
        index, box = at[item.name]
        if item.box == box:
            return index, None
        parts = zip(*item.box, box.offsets, strict=True)
        return index, tuple((d, o - base, n) for d, (o, n, base) in enumerate(parts))

    return tuple(tuple(source(m.item) for m in file.members) for file in layout.files)


def with_ranks(state: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The state with per-rank values under names of their own."""
    return {
        key: {_rank_key(place.rank): value.value} if isinstance(value, PerRank) else value
        for key, value in state.items()
    }


def _rank_key(rank: int) -> str:
    return f"@rank{rank:05d}"


def _is_own(name: str, place: Place) -> bool:
    return f".{_rank_key(place.rank)}" in name


def box_of(entry: Entry) -> Box:
    return Box(entry.box.offset, entry.box.shape)


def _is_empty_shard(entry: Entry) -> bool:
    return entry.nbytes == 0 and entry.box.shape != entry.global_shape


def _outer_tensors(flat: FlatState) -> dict[str, torch.Tensor]:
    """The tensor of the state that each leaf was taken from."""
    outer = flat.by_name
    found: dict[str, torch.Tensor] = {}
    for named in flat.tensors:
        name = named.name
        while name not in outer and "." in name:
            name = name.rpartition(".")[0]
        if name in outer:
            found[named.name] = outer[name]
    return found


def _replicas(tensor: Any) -> tuple[int, int]:
    """How many ranks hold the same shard of a DTensor, and which of them this is."""
    count, copy = 1, 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for size, at, placement in zip(
        tensor.device_mesh.shape, coordinate, tensor.placements, strict=False
    ):
        if isinstance(placement, Replicate):
            count, copy = count * size, copy * size + at
    return count, copy
