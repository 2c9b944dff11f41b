"""Safetensors files, one or many, as a tier that `restore` can read."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ckpt.dtypes import DTYPES, itemsize
from ckpt.fetch import Fetched
from ckpt.interop.errors import ForeignFormat
from ckpt.interop.trees import plain_values
from ckpt.manifest import File, Manifest, Piece, Tensor
from ckpt.reading import Extent
from ckpt.stores import Store
from ckpt.stores.file import FileStore

HEADER_BYTES_MAX = 100 << 20
NAMES = {code: name for name, (_, code) in DTYPES.items() if code is not None}
INDEX_SUFFIX = ".safetensors.index.json"


class SafetensorsTier:
    """All tensors of some files. An index, if there is one, is checked against the files."""

    def __init__(
        self, store: Store, files: Sequence[str], rename: Callable[[str], str | None]
    ) -> None:
        self.name, self._store, self._rename = store.url, store, rename
        self._files = sorted(files)
        self._manifest = self._described()

    def steps(self) -> list[tuple[int, str]]:
        return [(0, "")]

    def manifest(self, step: int) -> Manifest:
        return self._manifest

    def _described(self) -> Manifest:
        files, tensors, owners = [], {}, {}
        for number, key in enumerate(self._files):
            size = self._store.size(key)
            files.append(File(key, size, b""))
            for name, tensor in self._header(key, size, number).items():
                owners[name] = key
                new = self._rename(name)
                if new is not None:
                    tensors[new] = tensor
        self._check_index(owners)
        return Manifest(
            step=0,
            attempt="safetensors",
            created_unix_s=0.0,
            files=tuple(files),
            tensors=tensors,
            values=plain_values({}, None),
        )

    def _header(self, key: str, size: int, number: int) -> dict[str, Tensor]:
        prefix = bytearray(8)
        self._store.get_into(key, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise ForeignFormat(f"{self.name}/{key} is no safetensors file, or it is cut off")
        text = bytearray(length)
        self._store.get_into(key, memoryview(text), offset=8)
        try:
            table = json.loads(bytes(text))
            rows = {n: row for n, row in table.items() if n != "__metadata__"}
            found = {n: _tensor(row, 8 + length, number) for n, row in rows.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForeignFormat(f"{self.name}/{key} has a damaged header: {error}") from error
        end = max((p.offset + p.nbytes for t in found.values() for p in t.pieces), default=0)
        if end > size:
            raise ForeignFormat(f"{self.name}/{key} has {size:,} bytes instead of {end:,}")
        return {n: t for n, t in found.items() if not n.startswith("__pad__")}

    def _check_index(self, owners: dict[str, str]) -> None:
        indexes = [i.key for i in self._store.list() if i.key.endswith(INDEX_SUFFIX)]
        for key in indexes[:1] if len(self._files) > 1 else []:
            try:
                promised = json.loads(self._store.get(key))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ForeignFormat(f"{self.name}/{key} is no index: {error}") from error
            wrong = [n for n, file in promised.items() if owners.get(n) != file]
            if wrong:
                raise ForeignFormat(
                    f"{self.name}: {len(wrong)} tensors of the index are not in their files, "
                    f"the first is {wrong[0]}",
                    remedy="A file is missing or of another version: copy the directory again.",
                )

    def fetch(self, manifest: Manifest, extents: Sequence[Extent]) -> Fetched:
        image = Fetched()
        try:
            for extent in extents:
                self._bring(image, manifest.files[extent.file], extent)
        except BaseException:
            image.close()
            raise
        return image

    def _bring(self, image: Fetched, file: File, extent: Extent) -> None:
        """Map a local file; read the needed part of a remote one."""
        start, end = extent.start, extent.end
        if isinstance(self._store, FileStore):
            handle = os.open(self._store.path(file.key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(handle, file.size, mmap.MAP_PRIVATE)
            finally:
                os.close(handle)
            start, end = 0, file.size
        else:
            mapped = mmap.mmap(-1, end - start)
            self._store.get_into(file.key, memoryview(mapped), offset=start)
        pinned = ctypes.c_char.from_buffer(mapped)
        held: list[object] = [pinned, mapped]
        image.callback(held.clear)
        image.add(extent.file, start, end, ctypes.addressof(pinned))


def _tensor(row: dict[str, Any], data_start: int, file: int) -> Tensor:
    """One row of a header. Raises ValueError when it contradicts itself."""
    if row["dtype"] not in NAMES:
        raise ValueError(f"unknown type {row['dtype']!r}")
    kind, shape = NAMES[row["dtype"]], tuple(int(n) for n in row["shape"])
    start, end = row["data_offsets"]
    if end - start != prod(shape) * itemsize(kind) or start < 0:
        raise ValueError(f"{end - start} bytes for {kind}{list(shape)}")
    piece = Piece(file, data_start + start, end - start, (0,) * len(shape), shape)
    return Tensor(kind, shape, (piece,) if piece.nbytes else ())
