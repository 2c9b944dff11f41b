"""A store in this process's memory, for tests and for trying things out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from ckpt.stores.base import Buffer, Capabilities, Limits, ObjectInfo, Outcome, Store, Upload
from ckpt.stores.coalesce import Batch
from ckpt.stores.errors import ObjectMissing, ObjectShort
from ckpt.stores.parts import check_part, check_whole

CAPABILITIES = Capabilities(conditional_put=True, lists_orphans=True, detail="one process")


@cache
def _space(url: str) -> dict[str, tuple[bytes, float]]:
    """All stores of one URL in one process see the same objects."""
    return {}


class MemoryStore(Store):
    """`memory://name`."""

    def __init__(self, url: str = "memory://", limits: Limits | None = None) -> None:
        super().__init__(url, limits)
        self._objects = _space(url)
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer) -> None:
        self._objects[key] = bytes(data), time.time()

    def put_if_absent(self, key: str, data: Buffer) -> Outcome:
        mine = bytes(data), time.time()
        kept = self._objects.setdefault(key, mine)  # atomic: one wins of many
        return Outcome.CREATED if kept[0] == mine[0] else Outcome.EXISTS

    def start_upload(self, key: str, size_bytes: int) -> Upload:
        return _MemoryUpload(self, key, size_bytes)

    def stat(self, key: str) -> ObjectInfo | None:
        entry = self._objects.get(key)
        if entry is None:
            return None
        return ObjectInfo(key=key, size_bytes=len(entry[0]), modified_s=entry[1])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key in sorted(self._objects.copy()):
            info = self.stat(key) if key.startswith(prefix) else None
            if info is not None:
                yield info

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    def abort_orphans(self, prefix: str = "", *, older_than_s: float) -> Sequence[str]:
        return []

    def probe(self) -> Capabilities:
        return CAPABILITIES

    def _read(self, batch: Batch) -> None:
        entry = self._objects.get(batch.key)
        if entry is None:
            raise ObjectMissing(f"{self.url} has no object {batch.key}", key=batch.key)
        data, at = memoryview(entry[0]), batch.offset
        if at + batch.size_bytes > len(data):
            raise ObjectShort(
                f"{batch.key} has {len(data):,} bytes, but bytes up to "
                f"{at + batch.size_bytes:,} were asked",
                key=batch.key,
            )
        for into in batch.into:
            into[:] = data[at : at + len(into)]
            at += len(into)


class _MemoryUpload(Upload):
    def __init__(self, store: MemoryStore, key: str, size_bytes: int) -> None:
        self._store, self._key, self._data = store, key, bytearray(size_bytes)
        self._sent: set[int] = set()
        self.part_bytes = store.limits.part_bytes

    def put_part(self, index: int, data: Buffer) -> None:
        check_part(self._key, index, memoryview(data).nbytes, self.part_bytes, len(self._data))
        start = index * self.part_bytes
        self._data[start : start + memoryview(data).nbytes] = data
        self._sent.add(index)

    def finish(self) -> None:
        check_whole(self._key, self._sent, self.part_bytes, len(self._data))
        self._store.put(self._key, self._data)

    def abort(self) -> None:
        self._sent.clear()
