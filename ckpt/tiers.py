"""Where steps are looked for: memory of this host, of others, or a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ckpt.fetch import Fetched, fetch
from ckpt.listing import newest_first, read_manifest
from ckpt.manifest import Manifest
from ckpt.reading import Extent
from ckpt.stores import Store


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


def is_partial(tier: Tier) -> bool:
    """Whether a tier may hold only what the ranks of one host had: then the next one is asked."""
    return bool(getattr(tier, "is_partial", False))
