"""A stock DCP checkpoint as a tier that `restore` can read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from ckpt.dtypes import itemsize
from ckpt.fetch import Fetched
from ckpt.interop.errors import ForeignFormat
from ckpt.interop.pickles import read_metadata
from ckpt.interop.tensors import dtype_name
from ckpt.interop.trees import plain_values
from ckpt.manifest import File, Manifest, Piece, Tensor
from ckpt.reading import Extent
from ckpt.stores import Store
from ftcore.statedict.plain import TensorRef

VALUE_BYTES_MAX = 64 << 20


class StockDcpTier:
    """Each stored item of DCP (a small torch.save archive) is one file of the manifest."""

    def __init__(self, store: Store, rename: Callable[[str], str | None]) -> None:
        self.name, self._store, self._rename = store.url, store, rename
        self._places: list[Any] = []
        self._sizes = {info.key: info.size_bytes for info in store.list()}
        try:
            self._manifest = self._described()
        except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
            raise ForeignFormat(f"{self.name}/.metadata is damaged: {error}") from error

    def steps(self) -> list[tuple[int, str]]:
        return [(0, "")]

    def manifest(self, step: int) -> Manifest:
        return self._manifest

    def _described(self) -> Manifest:
        metadata = read_metadata(self._store.get(".metadata"), where=f"{self.name}/.metadata")
        self._places = []
        files: list[File] = []
        tensors: dict[str, Tensor] = {}
        leaves: dict[str, Any] = {}
        for name, described, new in self._renamed(metadata):
            if isinstance(described, dcp.TensorStorageMetadata):
                tensors[new] = self._tensor(name, described, metadata, files)
                leaves[name] = TensorRef(new)
            else:
                leaves[name] = self._value(name, metadata)
        return Manifest(
            step=0,
            attempt="dcp",
            created_unix_s=0.0,
            files=tuple(files),
            tensors=tensors,
            values=plain_values(leaves, _paths(leaves, metadata)),
        )

    def _renamed(self, metadata: dcp.Metadata) -> Iterator[tuple[str, Any, str]]:
        for name, described in metadata.state_dict_metadata.items():
            new = self._rename(name)
            if new is not None:
                yield name, described, new

    def _tensor(
        self, name: str, described: Any, metadata: dcp.Metadata, files: list[File]
    ) -> Tensor:
        kind = dtype_name(described.properties.dtype)
        pieces = []
        for chunk in described.chunks:
            size = torch.Size(chunk.sizes).numel() * itemsize(kind)
            if size:
                self._places.append(_place(metadata, name, chunk.offsets))
                number, box = len(files), (tuple(chunk.offsets), tuple(chunk.sizes))
                files.append(File(f"{name}@{list(chunk.offsets)}", size, b""))
                pieces.append(Piece(number, 0, size, *box))
        return Tensor(kind, tuple(described.size), tuple(pieces))

    def _value(self, name: str, metadata: dcp.Metadata) -> Any:
        place = _place(metadata, name, None)
        if place.length > VALUE_BYTES_MAX:
            raise ForeignFormat(f"{name} is a value of {place.length:,} bytes, too many to load")
        try:
            return torch.load(io.BytesIO(self._bytes(place)), weights_only=True)
        except Exception as error:
            raise ForeignFormat(f"{self.name}: {name} is no plain value: {error}") from error

    def _bytes(self, place: Any) -> bytearray:
        if place.transform_descriptors:
            raise ForeignFormat(
                f"{self.name}: {place.relative_path} is stored with {place.transform_descriptors}",
                remedy="Save it again without extensions (compression, encryption).",
            )
        if place.offset + place.length > self._sizes.get(place.relative_path, 0):
            raise ForeignFormat(f"{self.name}/{place.relative_path} is missing or cut off")
        data = bytearray(place.length)
        self._store.get_into(place.relative_path, memoryview(data), offset=place.offset)
        return data

    def fetch(self, manifest: Manifest, extents: Sequence[Extent]) -> Fetched:
        image = Fetched()
        for number in sorted({e.file for e in extents}):
            file = manifest.files[number]
            tensor = self._load(file, self._places[number])
            held = [tensor]
            image.callback(held.clear)
            image.add(number, 0, file.size, tensor.data_ptr())
        return image

    def _load(self, file: File, place: Any) -> torch.Tensor:
        data = io.BytesIO(self._bytes(place))
        try:
            tensor = torch.load(data, weights_only=True, map_location="cpu")
        except Exception as error:
            raise ForeignFormat(f"{self.name}: {file.key} cannot be read: {error}") from error
        if not isinstance(tensor, torch.Tensor) or tensor.nbytes != file.size:
            raise ForeignFormat(f"{self.name}: {file.key} is not the tensor its metadata describes")
        return tensor.contiguous()


def _place(metadata: dcp.Metadata, name: str, offset: Any) -> Any:
    place = metadata.storage_data[dcp.MetadataIndex(name, offset)]
    if not isinstance(place.relative_path, str) or place.offset < 0 or place.length < 0:
        raise ValueError(f"it does not say where {name} lies")
    return place


def _paths(leaves: dict[str, Any], metadata: dcp.Metadata) -> dict[str, Any] | None:
    paths = metadata.planner_data
    if not isinstance(paths, dict) or any(name not in paths for name in leaves):
        return None
    return {name: paths[name] for name in leaves}
