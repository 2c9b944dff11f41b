"""What every store promises: whole objects, honest conditional puts, ranged reads, deadlines."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from ckpt.stores.coalesce import Batch, Read, coalesce
from ckpt.stores.errors import ObjectMissing, StoreTimeout

__all__ = ["Buffer", "Capabilities", "Limits", "ObjectInfo", "Outcome", "Read", "Store", "Upload"]

ALIGNMENT = 4096
Buffer = bytes | bytearray | memoryview


class Outcome(enum.Enum):
    """What became of a put that must not replace anything."""

    CREATED = "created"  # the object holds our bytes, and the store promises nothing was there
    EXISTS = "exists"  # another object is there; ours was not written
    UNGUARDED = "unguarded"  # written after a look, by a store that cannot exclude a race

    @property
    def is_ours(self) -> bool:
        return self is not Outcome.EXISTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long, how often and how wide. These hold whatever the client library does."""

    stall_timeout_s: float = 20.0  # nothing was sent or received for so long
    request_timeout_s: float = 120.0  # one request of at most part_bytes, connect to last byte
    operation_timeout_s: float = 600.0  # one call of a Store method, all its tries together
    tries_max: int = 6  # of one request
    connections_max: int = 16
    part_bytes: int = 16 << 20  # of an upload and of a parallel read; a multiple of 4096
    single_put_bytes_max: int = 16 << 20  # larger objects are uploaded in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store was seen to do, not what it says."""

    conditional_put: bool  # of two puts that must not replace, exactly one wins
    lists_orphans: bool  # unfinished uploads can be found and removed
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    key: str
    size_bytes: int
    modified_s: float  # seconds since 1970 by the store's clock; 0.0 when it does not say


class Upload(ABC):
    """One object that appears whole at `finish()`, or never.

    `put_part` may be called from any thread and in any order. All parts but the last have exactly
    `part_bytes`. Leaving the block without `finish()` aborts and frees what was sent.
    """

    part_bytes: int

    @abstractmethod
    def put_part(self, index: int, data: Buffer) -> None:
        """Send the bytes from `index * part_bytes` on. A repeated part replaces the first."""

    @abstractmethod
    def finish(self) -> None:
        """Make the object durable and visible. Replaces an older object of this key at once."""

    @abstractmethod
    def abort(self) -> None:
        """Drop everything sent. Never raises; safe to repeat and after `finish()`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()


class Store(ABC):
    """A flat space of immutable-by-habit objects under keys such as `step-7/manifest.json`.

    All methods block and are safe to call from many threads. When a method returns, its effect is
    durable. They raise `StoreError`s only, within `limits.operation_timeout_s`.
    """

    url: str
    limits: Limits
    gap_bytes_max = ALIGNMENT  # reads with at most this between them become one request

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        self.url = url
        self.limits = limits or Limits()
        self._workers = ThreadPoolExecutor(self.limits.connections_max, "ckpt-store")

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write the whole object; a reader sees the old one or the new one, never a mixture."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> Outcome:
        """Write the object unless there is one. For small objects (at most single_put_bytes_max).

        A retry after a lost answer finds its own bytes and says CREATED, so `data` should hold
        something that only this writer writes.
        """

    @abstractmethod
    def start_upload(self, key: str, size_bytes: int) -> Upload:
        """Begin an object of exactly `size_bytes` that arrives in parts."""

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo | None:
        """The object's size and age, or None when there is none."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every whole object whose key starts with `prefix`, in order of keys."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove these objects; missing ones are no error."""

    @abstractmethod
    def abort_orphans(self, prefix: str = "", *, older_than_s: float) -> Sequence[str]:
        """Drop uploads begun at least this long ago and never finished, and those whose writer is
        known to be dead; answer their keys."""

    @abstractmethod
    def probe(self) -> Capabilities:
        """Try once, under a key of our own, whether conditional puts hold. The answer is kept."""

    @abstractmethod
    def _read(self, batch: Batch) -> None:
        """Fill the buffers of one request, with tries and deadline."""

    def get_many(self, reads: Iterable[Read]) -> None:
        """Fill all these buffers, `connections_max` requests at a time.

        Neighbours go together and large reads in parts, so 20,000 small reads are cheap. Raises
        the first failure after the reads under way have ended, so that no thread writes into the
        caller's memory any more once this returns.
        """
        batches = coalesce(
            reads, part_bytes=self.limits.part_bytes, gap_bytes_max=self.gap_bytes_max
        )
        if len(batches) == 1:
            self._read(batches[0])
        elif batches:
            self.run_parallel([partial(self._read, batch) for batch in batches])

    def get_into(self, key: str, into: memoryview, *, offset: int = 0) -> None:
        """Fill `into` from `offset` on, in parallel parts."""
        self.get_many([Read(key=key, offset=offset, into=into)])

    def get(self, key: str) -> bytes:
        """The whole object."""
        data = bytearray(self.size(key))
        self.get_into(key, memoryview(data))
        return bytes(data)

    def size(self, key: str) -> int:
        """The object's size in bytes; raises ObjectMissing."""
        info = self.stat(key)
        if info is None:
            raise ObjectMissing(f"{self.url} has no object {key}", key=key)
        return info.size_bytes

    def put_large(self, key: str, data: Buffer) -> None:
        """Upload one buffer in parallel parts."""
        view = memoryview(data).cast("B")
        with self.start_upload(key, len(view)) as upload:
            step = upload.part_bytes
            parts = [(i, view[o : o + step]) for i, o in enumerate(range(0, len(view), step))]
            self.run_parallel([partial(upload.put_part, *part) for part in parts])
            upload.finish()

    def run_parallel(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run these calls in the store's threads; raise the first error once all have ended."""
        futures = [self._workers.submit(call) for call in calls]
        try:
            for future in futures:
                future.result(timeout=self.limits.operation_timeout_s)
        except FutureTimeout as error:
            raise StoreTimeout(
                f"{self.url}: {len(futures)} transfers did not end within "
                f"{self.limits.operation_timeout_s:g} s",
            ) from error
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        """Give back connections and threads."""
        self._workers.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
