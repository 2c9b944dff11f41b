"""Bring one step into one state: match names, read and compare, then change the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt import filling
from ckpt.capture import Place, Planner, box_of, with_ranks
from ckpt.errors import CheckpointError, StateMismatch
from ckpt.fetch import Fetched
from ckpt.manifest import Manifest
from ckpt.reading import ReadPlan, Report, Want, plan_read
from ckpt.tiers import Tier
from ftcore.statedict import Entry, FlatState, decode, encode, flatten, prepare
from ftcore.statedict import Layout as StateLayout
from ftcore.statedict.entries import Box as StateBox

Select = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for."""

    step: int | None = None
    strict: bool = True
    select: Select | None = None
    allow_fallback: bool = True

    def wants(self, name: str) -> bool:
        return self.select is None or self.select(name)


def as_select(
    only: str | Iterable[str] | Callable[[str], bool] | None,
) -> Callable[[str], bool] | None:
    """A predicate on names from a prefix, prefixes or a predicate."""
    if only is None or callable(only):
        return only
    prefixes = (only,) if isinstance(only, str) else tuple(only)
    if not prefixes:
        raise CheckpointError("`only` selects nothing", remedy="Give a prefix or a predicate.")
    return lambda name: name.startswith(prefixes)


class Loading:
    """One manifest on its way into one state."""

    def __init__(
        self,
        state: Mapping[str, Any],
        manifest: Manifest,
        place: Place,
        request: Request,
        planner: Planner,
    ) -> None:
        self._state, self._manifest, self._planner = state, manifest, planner
        self._place, self._request = place, request
        self._root = with_ranks(state, place)
        self._image: Fetched | None = None
        self._undo: Callable[[], None] = lambda: None
        self._flat: FlatState | None = None
        self.plan = ReadPlan(copies=(), extents=(), report=Report())

    def read(self, tier: Tier) -> None:
        """Match and read. Raises StateMismatch, or what the tier raises; nothing has changed."""
        try:
            self._match()
            self._image = tier.fetch(self._manifest, self.plan.extents)
        except BaseException:
            self.undo()
            raise

    def _match(self) -> None:
        if not self._match_again():
            self._match_anew()
        aliases = {e.name for e in self._entries if e.alias_of is not None}
        self._wants = [
            Want(e.name, e.dtype, e.global_shape, box_of(e))
            for e in self._entries
            if e.alias_of is None
        ]
        self.plan = plan_read(
            self._wants,
            self._manifest,
            select=lambda name: self._request.wants(name) and name not in aliases,
        )
        report = self.plan.report
        bad = report.mismatched or report.incomplete
        if bad or (self._request.strict and not report.is_exact):
            raise StateMismatch(
                f"step {self._manifest.step} does not fit: {report.describe()}", report=report
            )

    def _match_again(self) -> bool:
        """A state of containers that was saved by this process, and whose plain values are those
        of the checkpoint: only tensors have to be filled."""
        captured = self._planner.capture_pure(self._state, self._place)
        if captured is None or not self._is_as_saved(captured.plain):
            return False
        self._entries = captured.planned.entries
        leaves = zip(captured.tensors, self._entries, strict=True)
        self._tensors = [t for t, e in leaves if e.alias_of is None]
        return True

    def _is_as_saved(self, plain: bytes) -> bool:
        """Whether these plain values are those of the checkpoint, which all of it are to be."""
        own = self._manifest.values.get(str(self._place.index), self._manifest.values.get("0"))
        is_whole = self._request.select is None
        return is_whole and plain == str(own).encode("utf-8", "surrogatepass")

    def _match_anew(self) -> None:
        flat = flatten(self._root)
        self._undo = filling.saved_optimizers(flat)
        if flat.owners or not self._is_as_saved(flat.plain):
            self._saved = filling.merged_plain(self._manifest, self._place.index)
            if self._request.select is None and flat.optimizers():
                layout = state_layout(self._manifest)
                flat = prepare(self._root, layout, encode(self._saved))
            self._flat = flat
        self._entries = tuple(t.entry for t in flat.tensors)
        self._tensors = [t.tensor for t in flat.tensors if t.entry.alias_of is None]

    def apply(self) -> None:
        """Change the state: from here on a failure says what was changed."""
        assert self._image is not None
        try:
            filling.fill(self._tensors, self._wants, self.plan.copies, self._image)
            if self._flat is not None:
                self._flat.load(encode(self._tree()))
        except Exception as error:
            names = [self._wants[c.want].name for c in self.plan.copies]
            raise CheckpointError(
                f"step {self._manifest.step}: the state refused its values after {len(names)} "
                f"tensors were written ({names[0] if names else 'none'} first): {error}",
                remedy="The state is partly changed: restore again before training.",
            ) from error
        if self._flat is not None:
            filling.put_back(self._state, self._root)

    def _tree(self) -> Any:
        mine = f"@rank{self._place.rank:05d}"
        saved = filling.without_other_ranks(self._saved, mine)
        assert self._flat is not None
        live = decode(self._flat.plain)
        return filling.overlay(live, saved, self._request.wants)

    def undo(self) -> None:
        """Give optimizers back what they held, and memory its bytes."""
        self._undo()
        self.__exit__()

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._image is not None:
            self._image.close()
            self._image = None


def state_layout(manifest: Manifest) -> StateLayout:
    """The layout of a whole state, as the statedict package describes one."""
    return StateLayout(
        tuple(
            Entry(
                name=name,
                dtype=t.dtype,
                global_shape=t.shape,
                box=StateBox(offset=(0,) * len(t.shape), shape=t.shape),
                itemsize=max(torch.empty(0, dtype=getattr(torch, t.dtype)).element_size(), 1),
            )
            for name, t in manifest.tensors.items()
        )
    )
