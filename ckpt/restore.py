"""Restore the newest complete step from the nearest tier, and fall back when bytes are bad.

Order of work: match names, read and check everything, then change the state. Whatever fails before
the last part leaves the state as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckpt import filling
from ckpt.capture import Place, Planner, box_of, with_ranks
from ckpt.errors import CheckpointError, StateMismatch
from ckpt.fetch import Fetched, fetch
from ckpt.listing import newest_first, read_manifest
from ckpt.manifest import Manifest
from ckpt.meet import Meeting
from ckpt.reading import Extent, ReadPlan, Report, Want, plan_read
from ckpt.stores import Store
from ftcore.base.errors import FtError
from ftcore.base.log import event
from ftcore.statedict import Entry, FlatState, decode, encode, flatten, prepare
from ftcore.statedict import Layout as StateLayout
from ftcore.statedict.entries import Box as StateBox

log = logging.getLogger(__name__)
Select = Callable[[str], bool]


class Tier(Protocol):
    """A place that may have steps: memory of this host, of others, or a store."""

    name: str

    def steps(self) -> list[tuple[int, str]]:
        """(step, attempt) of what is complete here; the attempt may be "" when it costs a read."""

    def manifest(self, step: int) -> Manifest: ...

    def fetch(self, manifest: Manifest, extents: Sequence[Extent]) -> Fetched: ...


class StoreTier:
    """A destination."""

    def __init__(
        self,
        store: Store,
        progress: Callable[[int], None] = lambda n: None,
        *,
        is_partial: bool = False,
    ) -> None:
        self.name, self._store, self._progress = store.url, store, progress
        self.is_partial = is_partial

    def steps(self) -> list[tuple[int, str]]:
        return [(step, "") for step in newest_first(self._store)]

    def manifest(self, step: int) -> Manifest:
        return read_manifest(self._store, step)

    def fetch(self, manifest: Manifest, extents: Sequence[Extent]) -> Fetched:
        return fetch(self._store, manifest, extents, progress=self._progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored, from where, how fast, and what was tried before."""

    step: int
    attempt: str
    tier: str
    bytes: int
    seconds: float
    report: Report
    skipped: tuple[str, ...] = ()
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for."""

    step: int | None = None
    strict: bool = True
    select: Select | None = None
    allow_fallback: bool = True

    def wants(self, name: str) -> bool:
        return self.select is None or self.select(name)


class Restorer:
    """One restore of one state by one rank."""

    def __init__(
        self,
        state: Mapping[str, Any],
        tiers: Sequence[Tier],
        *,
        place: Place,
        meeting: Meeting,
        planner: Planner,
    ) -> None:
        self._state, self._tiers, self._planner = state, tiers, planner
        self._place, self._meeting = place, meeting
        self._skipped: list[str] = []

    def run(self, request: Request) -> Restored | None:
        """Restore, or return None when no tier has a complete step for all ranks."""
        started = time.monotonic()
        refused: set[tuple[int, str]] = set()
        last_error: CheckpointError | None = None
        while True:
            offers = self._offers(request, refused)
            chosen = self._agree(offers)
            if chosen is None:
                if last_error is not None:
                    raise last_error
                return None
            done, error = self._try(chosen, offers[chosen], request, started)
            if done is not None:
                return done
            last_error = error or last_error
            refused.add(chosen)
            if not request.allow_fallback and last_error is not None:
                raise last_error

    def _offers(
        self, request: Request, refused: set[tuple[int, str]]
    ) -> dict[tuple[int, str], list[tuple[Tier, Manifest]]]:
        """What this rank could restore: by (step, attempt), the tiers that have it, nearest first.

        With one rank only the newest step's manifest is read.
        """
        offers: dict[tuple[int, str], list[tuple[Tier, Manifest]]] = {}
        known = [(tier, step) for tier in self._tiers for step in self._steps(tier)]
        steps = sorted({s for _, s in known}, reverse=True)
        if request.step is not None:
            steps = [s for s in steps if s == request.step]
        for step in steps:
            for tier in (t for t, s in known if s == step):
                manifest = self._manifest(tier, step)
                if manifest is not None and (step, manifest.attempt) not in refused:
                    offers.setdefault((step, manifest.attempt), []).append((tier, manifest))
            if offers and self._place.ranks == 1:
                break
            if len(offers) >= 4:
                break
        return offers

    def _steps(self, tier: Tier) -> list[int]:
        try:
            return [step for step, _ in tier.steps()]
        except (FtError, OSError) as error:
            self._skip(f"{tier.name}: {error}")
            return []

    def _manifest(self, tier: Tier, step: int) -> Manifest | None:
        try:
            return tier.manifest(step)
        except (FtError, OSError) as error:
            self._skip(f"{tier.name} step {step}: {error}")
            return None

    def _skip(self, text: str) -> None:
        if text not in self._skipped:
            self._skipped.append(text)
            event(log, "restore.skipped", level=logging.WARNING, reason=text)

    def _agree(self, offers: Mapping[tuple[int, str], object]) -> tuple[int, str] | None:
        """The newest step that every rank can restore."""
        mine = [list(key) for key in offers]
        all_of = [{(s, a) for s, a in given} for given in self._meeting.exchange(mine)]
        common = set.intersection(*all_of)
        return max(common, default=None)

    def _try(
        self,
        chosen: tuple[int, str],
        tiers: Sequence[tuple[Tier, Manifest]],
        request: Request,
        started: float,
    ) -> tuple[Restored | None, CheckpointError | None]:
        """Read one step from its tiers in turn; change the state only when every rank has read."""
        last: CheckpointError | None = None
        loading: Loading | None = None
        try:
            for tier, manifest in tiers:
                loading = Loading(self._state, manifest, self._place, request, self._planner)
                try:
                    loading.read(tier)
                    break
                except (FtError, OSError) as error:
                    if isinstance(error, StateMismatch) and not is_partial(tier):
                        raise
                    last = as_checkpoint_error(error)
                    self._skip(f"{tier.name} step {chosen[0]}: {error}")
                    loading.undo()
                    loading = None
        except BaseException as error:
            self._meeting.exchange(f"{type(error).__name__}: {error}")
            raise
        answers = self._meeting.exchange("" if loading is not None else str(last))
        if loading is None or any(answers):
            if loading is not None:
                loading.undo()
            return None, last or CheckpointError(
                f"another rank failed: {next(filter(None, answers))}"
            )
        with loading:
            loading.apply()
        done = Restored(
            step=chosen[0],
            attempt=chosen[1],
            tier=tier.name,
            bytes=loading.plan.bytes,
            seconds=time.monotonic() - started,
            report=loading.plan.report,
            skipped=tuple(self._skipped),
            metrics=manifest.metrics,
        )
        event(log, "restored", step=done.step, tier=done.tier, seconds=done.seconds)
        return done, None


def is_partial(tier: Tier) -> bool:
    """Whether a tier may hold only what the ranks of one host had: then the next one is asked."""
    return bool(getattr(tier, "is_partial", False))


def as_checkpoint_error(error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    remedy = getattr(error, "remedy", None) or CheckpointError.remedy
    return CheckpointError(f"{type(error).__name__}: {error}", remedy=remedy)


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
        captured = self._planner.capture_pure(self._state)
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
