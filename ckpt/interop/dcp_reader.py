"""`dcp.load` on our format: `dcp.load(state, storage_reader=CkptReader(url, step=7))`."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt.boxes import Box
from ckpt.errors import StateMismatch
from ckpt.fetch import fetch
from ckpt.filling import fill
from ckpt.interop.address import split_address
from ckpt.interop.tensors import dtype_name, dtype_of
from ckpt.interop.trees import flat_names, tree_of
from ckpt.listing import find_manifest
from ckpt.manifest import Manifest, Piece, Tensor
from ckpt.reading import Copy, Want, extents_of
from ckpt.stores import Store, open_store
from ftcore.statedict.plain import TensorRef


class CkptReader(StorageReader):  # type: ignore[misc]
    """Reads the newest step of a directory or URL, or `step`. Every byte is checked on the way.

    Works at any world size: each rank reads only the chunks that hold what it asks for.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, step: int | None = None, **options: Any
    ) -> None:
        self._options = options
        self._open(url, step)

    def _open(self, url: str | os.PathLike[str], step: int | None) -> None:
        root, named = split_address(url)
        self._store: Store = open_store(root, **self._options)
        self._step = step if named is None else named
        self._found: Manifest | None = None
        self._leaves: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._open(checkpoint_id, None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return split_address(checkpoint_id)[1] is not None

    @property
    def manifest(self) -> Manifest:
        if self._found is None:
            self._found = find_manifest(self._store, self._step)
        return self._found

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The manifest as DCP knows it. Tensors keep their names, values get those of DCP."""
        self._leaves, paths = flat_names(tree_of(self.manifest))
        described: dict[str, Any] = {}
        for name, leaf in self._leaves.items():
            is_tensor = isinstance(leaf, TensorRef)
            described[name] = _describe(self._tensor(name)) if is_tensor else _BYTES
        return dcp.Metadata(described, planner_data=paths, storage_data={}, version="1.0.0")

    def _tensor(self, name: str) -> Tensor:
        return self.manifest.tensors[self._leaves[name].name]

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if not self._leaves:
            self._leaves, _ = flat_names(tree_of(self.manifest))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item))
        self._read_tensors([i for i in plan.items if i.type != LoadItemType.BYTE_IO], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _value(self, item: ReadItem) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(self._leaves[item.storage_index.fqn], file)
        file.seek(0)
        return file

    def _read_tensors(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """All tensors of the plan are read and checked before the first one is changed."""
        wants, copies = [], []
        for number, item in enumerate(items):
            stored = self._tensor(item.storage_index.fqn)
            piece = _piece(stored, item)
            box = _box(piece, item)
            wants.append(Want(item.storage_index.fqn, stored.dtype, stored.shape, box))
            copies.append(Copy(number, piece, box))
        with fetch(self._store, self.manifest, extents_of(copies, wants, self.manifest)) as image:
            targets = [planner.resolve_tensor(item).detach() for item in items]
            direct = [_direct(t, w) for t, w in zip(targets, wants, strict=True)]
            fill(direct, wants, copies, image)
        for item, target, filled in zip(items, targets, direct, strict=True):
            if filled is not target:
                target.copy_(filled)
            planner.commit_tensor(item, target)


_BYTES = dcp.BytesStorageMetadata()


def _describe(tensor: Tensor) -> dcp.TensorStorageMetadata:
    chunks = [
        dcp.ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.lengths))
        for p in tensor.pieces
    ]
    if not chunks:  # a tensor without elements
        zero = torch.Size([0] * len(tensor.shape))
        chunks = [dcp.ChunkStorageMetadata(zero, torch.Size(tensor.shape))]
    properties = dcp.TensorProperties(dtype=dtype_of(tensor.dtype))
    return dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


def _piece(stored: Tensor, item: ReadItem) -> Piece:
    offset = item.storage_index.offset
    for piece in stored.pieces:
        if offset is None or tuple(offset) == piece.offsets:
            return piece
    if 0 in stored.shape:
        return Piece(0, 0, 0, (0,) * len(stored.shape), stored.shape)
    raise StateMismatch(f"{item.storage_index.fqn} has no stored part at {list(offset or ())}")


def _box(piece: Piece, item: ReadItem) -> Box:
    starts = zip(piece.offsets, item.storage_offsets, strict=True)
    return Box(tuple(a + b for a, b in starts), tuple(item.lengths))


def _direct(target: torch.Tensor, want: Want) -> torch.Tensor:
    """The target itself when stored bytes can go there as they are, else memory beside it."""
    if target.device.type == "cpu" and dtype_name(target.dtype) == want.dtype:
        return target
    return torch.empty(want.box.lengths, dtype=dtype_of(want.dtype))
