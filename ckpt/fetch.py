"""Bring the bytes of a committed step into memory, with every chunk checked before anyone sees it.

Local files are mapped and checked where the page cache has them, so that nothing is held twice;
objects of a remote store are read once, into memory, and checked there.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol, Self

from ckpt.boxes import Box, runs
from ckpt.dtypes import itemsize
from ckpt.errors import Corrupt
from ckpt.hashing import damaged_chunks
from ckpt.manifest import Manifest, step_directory
from ckpt.mapped import MappedFile
from ckpt.reading import Copy, Extent, Want, plan_read, units, wants_everything
from ckpt.stores import Store
from ckpt.stores.errors import ObjectMissing, ObjectShort
from ckpt.stores.file import FileStore

LOCAL_THREADS = 4


class Image(Protocol):
    """Checked bytes of the files of one step."""

    def address(self, file: int, offset: int) -> int:
        """Where byte `offset` of a file lies in memory; what was fetched after it follows."""


class Fetched(ExitStack):
    """An image that is valid inside a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, file: int, start: int, end: int, address: int) -> None:
        self._spans.setdefault(file, []).append((start, end, address))

    def address(self, file: int, offset: int) -> int:
        for start, end, address in self._spans[file]:
            if start <= offset <= end:
                return address + offset - start
        raise AssertionError(f"byte {offset} of file {file} was not fetched")

    def __enter__(self) -> Self:
        return self


def fetch(
    store: Store,
    manifest: Manifest,
    extents: Sequence[Extent],
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Fetched:
    """Read and check `extents`. Raises Corrupt or a StoreError; then nothing is left behind."""
    check_sizes(store, manifest, {e.file for e in extents})
    if isinstance(store, FileStore):
        return _map_files(store, manifest, extents, progress)
    return _read_into_memory(store, manifest, extents, progress)


def check_sizes(store: Store, manifest: Manifest, files: Iterable[int]) -> None:
    """Every file must be there and have its size: cheap, and finds most damage at once."""
    directory = step_directory(manifest.step)
    wanted = {f"{directory}/{manifest.files[n].key}": manifest.files[n].size for n in files}
    sizes = {i.key: i.size_bytes for i in store.list(f"{directory}/")} if wanted else {}
    for key, size in wanted.items():
        if key not in sizes:
            raise ObjectMissing(f"{store.url} has no {key}, which its manifest names", key=key)
        if sizes[key] != size:
            raise Corrupt(f"{store.url}/{key} has {sizes[key]} bytes instead of {size}", key=key)


def verify_extents(
    store: Store,
    manifest: Manifest,
    extents: Iterable[Extent],
    *,
    threads: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    keep_going: list[Corrupt] | None = None,
) -> None:
    """Read extents through small buffers and check every chunk. With `keep_going` damage is
    collected there instead of raised."""

    def check(unit: Extent) -> None:
        buffer = memoryview(bytearray(unit.end - unit.start))
        try:
            _read_unit(store, manifest, unit, buffer)
        except (Corrupt, ObjectMissing, ObjectShort) as error:
            if keep_going is None:
                raise
            keep_going.append(Corrupt(str(error), found=error))
        progress(len(buffer))

    _in_threads(check, units(extents, manifest.chunk_bytes), threads)


def _read_unit(store: Store, manifest: Manifest, unit: Extent, buffer: memoryview) -> None:
    key = f"{step_directory(manifest.step)}/{manifest.files[unit.file].key}"
    store.get_into(key, buffer, offset=unit.start)
    _check_unit(store, manifest, unit, buffer)


def _check_unit(store: Store, manifest: Manifest, unit: Extent, data: memoryview) -> None:
    file, chunk = manifest.files[unit.file], manifest.chunk_bytes
    damaged = damaged_chunks(data, file.digests, first=unit.start // chunk, chunk_bytes=chunk)
    if damaged:
        key = f"{step_directory(manifest.step)}/{file.key}"
        raise Corrupt(
            f"{store.url}/{key}: bytes {damaged[0] * chunk} to {(damaged[0] + 1) * chunk} are not "
            f"as written ({len(damaged)} damaged chunks in this part)",
            key=key,
            chunks=damaged,
            tensors=tensors_at(manifest, unit.file, damaged),
        )


def tensors_at(manifest: Manifest, file: int, chunks: Iterable[int]) -> list[str]:
    """Names of the tensors that have bytes in these chunks of a file."""
    spans = [(c * manifest.chunk_bytes, (c + 1) * manifest.chunk_bytes) for c in chunks]
    return [
        name
        for name, tensor in manifest.tensors.items()
        for p in tensor.pieces
        if p.file == file and any(p.offset < end and p.offset + p.nbytes > at for at, end in spans)
    ]


def _in_threads(call: Callable[[Extent], None], work: Iterable[Extent], threads: int) -> None:
    pool = ThreadPoolExecutor(threads, "ckpt-read")
    try:
        for _ in pool.map(call, list(work)):
            pass
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _map_files(
    store: FileStore,
    manifest: Manifest,
    extents: Sequence[Extent],
    progress: Callable[[int], None],
) -> Fetched:
    fetched = Fetched()
    directory = step_directory(manifest.step)
    try:
        maps: dict[int, MappedFile] = {}
        for number in sorted({e.file for e in extents}):
            file = manifest.files[number]
            mapped = maps[number] = MappedFile(store.path(f"{directory}/{file.key}"), file.size)
            fetched.callback(mapped.close)
            fetched.add(number, 0, file.size, mapped.address)

        def check(unit: Extent) -> None:
            data = maps[unit.file].bring_in(unit.start, unit.end)
            _check_unit(store, manifest, unit, data)
            progress(len(data))

        _in_threads(check, units(extents, manifest.chunk_bytes), LOCAL_THREADS)
    except BaseException:
        fetched.close()
        raise
    return fetched


def _read_into_memory(
    store: Store,
    manifest: Manifest,
    extents: Sequence[Extent],
    progress: Callable[[int], None],
) -> Fetched:
    fetched = Fetched()
    try:
        buffers: dict[tuple[int, int], memoryview] = {}
        for extent in extents:
            mapped = mmap.mmap(-1, extent.end - extent.start)
            mapped.madvise(mmap.MADV_HUGEPAGE)
            address = _hold(fetched, mapped)
            fetched.add(extent.file, extent.start, extent.end, address)
            view = memoryview(mapped)
            fetched.callback(view.release)
            buffers[extent.file, extent.start] = view
        starts = sorted(buffers)

        def read(unit: Extent) -> None:
            start = max(s for f, s in starts if f == unit.file and s <= unit.start)
            view = buffers[unit.file, start]
            part = view[unit.start - start : unit.end - start]
            _read_unit(store, manifest, unit, part)
            progress(len(part))

        work = units(extents, manifest.chunk_bytes)
        _in_threads(read, work, store.limits.connections_max)
    except BaseException:
        fetched.close()
        raise
    return fetched


def _hold(fetched: ExitStack, mapped: mmap.mmap) -> int:
    """Keep a mapping until the image is closed; return where it lies."""
    pinned = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(pinned)
    held: list[object] = [pinned, mapped]
    fetched.callback(held.clear)
    return address


def read_tensors(
    store: Store, manifest: Manifest, names: Sequence[str]
) -> Mapping[str, memoryview]:
    """Whole tensors as checked bytes in C order, for tools that want no torch."""
    chosen = set(names)
    wants = wants_everything({n: t for n, t in manifest.tensors.items() if n in chosen})
    plan = plan_read(wants, manifest, select=lambda name: name in chosen)
    by_want: dict[int, list[Copy]] = {}
    for copy in plan.copies:
        by_want.setdefault(copy.want, []).append(copy)
    image = fetch(store, manifest, plan.extents)
    with image:
        found = {w.name: _gather(w, by_want.get(i, []), image) for i, w in enumerate(wants)}
    return found


def _gather(want: Want, copies: Sequence[Copy], image: Image) -> memoryview:
    size = itemsize(want.dtype)
    target = bytearray(want.box.elements * size)
    if not target:
        return memoryview(target)
    base = ctypes.addressof(ctypes.c_char.from_buffer(target))
    for copy in copies:
        source = image.address(copy.piece.file, copy.piece.offset)
        stored = Box(copy.piece.offsets, copy.piece.lengths)
        for run in runs(stored, want.box, copy.common):
            ctypes.memmove(
                base + run.target * size, source + run.source * size, run.elements * size
            )
    return memoryview(target)
