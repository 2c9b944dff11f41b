"""`dcp.save` in our format: `dcp.save(state, storage_writer=CkptWriter(url, step=7))`."""

from __future__ import annotations

import io
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt.boxes import Box
from ckpt.errors import CheckpointError, SaveFailed
from ckpt.hashing import chunk_digests, content_name
from ckpt.interop.address import split_address
from ckpt.interop.tensors import at_address, dtype_name
from ckpt.interop.trees import plain_values
from ckpt.manifest import File, Manifest, Piece, Tensor, manifest_key, step_directory
from ckpt.plan import FilePlan, Item, plan
from ckpt.stores import Outcome, Store, open_store
from ftcore.base.errors import BadSetting
from ftcore.statedict import CannotStore, decode, encode
from ftcore.statedict.plain import TensorRef


class CkptWriter(StorageWriter):  # type: ignore[misc]
    """Writes one step. The manifest, written last by the coordinator, commits it.

    A committed step is never overwritten. Values that are neither tensors nor plain are refused
    with their names, because nothing of a checkpoint is unpickled into objects.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, step: int | None = None, **options: Any
    ) -> None:
        self._options, self._step = options, step
        self._open(url)

    def _open(self, url: str | os.PathLike[str]) -> None:
        root, named = split_address(url)
        self._store: Store = open_store(root, **self._options)
        if named is not None:
            self._step = named

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._open(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return split_address(checkpoint_id)[1] is not None

    @property
    def step(self) -> int:
        if self._step is None:
            raise BadSetting(
                "the step to save is not known",
                remedy="Give CkptWriter(url, step=7) or a checkpoint_id .../step-0000000007.",
            )
        return self._step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator and self._store.stat(manifest_key(self.step)) is not None:
            raise _committed(self._store.url, self.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = [i for i in plan.items if i.type != WriteItemType.BYTE_IO]
        values = [i for i in plan.items if i.type == WriteItemType.BYTE_IO]
        results = self._write_tensors(tensors, planner)
        results += [_value(item, planner.resolve_data(item)) for item in values]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_tensors(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """One file image at a time is in memory; equal names are told apart by their boxes."""
        ours = [_item(item) for item in items]
        of_box = {(o.name, o.box): item for o, item in zip(ours, items, strict=True)}
        results = []
        for file in plan(ours).files:
            image = memoryview(mmap.mmap(-1, file.size))
            image[: file.data_start] = file.header
            whole_items = _members(file, of_box)
            for member, item, cut in whole_items:
                _copy_in(image, member, planner.resolve_data(item), cut)
            stored = self._put(image)
            results += [
                WriteResult(item.index, member.item.nbytes, (stored, *_placed(member)))
                for member, item, _ in whole_items
            ]
        return results

    def _put(self, image: memoryview) -> tuple[str, int, bytes]:
        digests = chunk_digests(image)
        key = f"dcp-{secrets.token_hex(4)}-{content_name(digests)}.safetensors"
        self._store.put_large(f"{step_directory(self.step)}/{key}", image)
        return key, len(image), digests

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Called by the coordinator with what all ranks wrote: put the manifest."""
        manifest = manifest_of(self.step, metadata, [r for of in results for r in of])
        key = manifest_key(self.step)
        if self._store.put_if_absent(key, manifest.to_bytes()) is Outcome.EXISTS:
            raise _committed(self._store.url, self.step)


def _committed(url: str, step: int) -> CheckpointError:
    return SaveFailed(
        f"step {step} at {url} is committed already",
        remedy="Save under another step, or remove this one with `ckpt prune`.",
    )


def _item(item: WriteItem) -> Item:
    data = item.tensor_data
    assert data is not None
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Item(item.index.fqn, dtype_name(data.properties.dtype), tuple(data.size), box)


Cut = tuple[slice, ...]


def _members(
    file: FilePlan, of_box: dict[tuple[str, Box], WriteItem]
) -> list[tuple[Any, WriteItem, Cut]]:
    """Each member of a file with the item it is of, and which part of it (large ones are cut)."""
    found = []
    for member in file.members:
        box = member.item.box
        owner = next(
            (name_box, item)
            for name_box, item in of_box.items()
            if name_box[0] == member.item.name and _holds(name_box[1], box)
        )
        starts = zip(box.offsets, owner[0][1].offsets, box.lengths, strict=True)
        cut = tuple(slice(o - start, o - start + n) for o, start, n in starts)
        found.append((member, owner[1], cut))
    return found


def _holds(outer: Box, inner: Box) -> bool:
    rows = zip(outer.offsets, outer.lengths, inner.offsets, inner.lengths, strict=True)
    return all(o <= i and i + n <= o + m for o, m, i, n in rows)


def _copy_in(image: memoryview, member: Any, data: torch.Tensor, cut: Cut) -> None:
    item = member.item
    if not item.nbytes:
        return
    base = torch.frombuffer(image, dtype=torch.uint8).data_ptr()
    piece = Piece(0, member.offset, item.nbytes, *item.box)
    at_address(base + member.offset, piece, item.dtype).copy_(data.detach()[cut])


def _placed(member: Any) -> tuple[object, ...]:
    item = member.item
    return member.offset, item.nbytes, item.box.offsets, item.box.lengths


def _value(item: WriteItem, data: io.BytesIO) -> WriteResult:
    name = item.index.fqn
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)
        text = encode(value, path=name)
    except CannotStore:
        raise
    except Exception as error:
        raise CannotStore(
            f"{name} is neither a tensor nor a plain value: {error}",
            remedy="Save numbers, strings, lists and dicts, or register its type.",
        ) from error
    return WriteResult(item.index, len(text), text)


def manifest_of(step: int, metadata: dcp.Metadata, results: Sequence[WriteResult]) -> Manifest:
    """What all ranks wrote as one manifest."""
    files: dict[str, File] = {}
    pieces: dict[str, list[Piece]] = {}
    leaves: dict[str, Any] = {}
    for result in results:
        name, data = result.index.fqn, result.storage_data
        if isinstance(data, bytes):
            leaves[name] = decode(data)
            continue
        stored, offset, nbytes, offsets, lengths = data
        files.setdefault(stored[0], File(*stored))
        number = list(files).index(stored[0])
        pieces.setdefault(name, []).append(Piece(number, offset, nbytes, offsets, lengths))
    tensors = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, dcp.TensorStorageMetadata):
            kind, shape = dtype_name(described.properties.dtype), tuple(described.size)
            found = {(p.offsets, p.lengths): p for p in pieces.get(name, ())}
            tensors[name] = Tensor(kind, shape, tuple(found.values()))
            leaves[name] = TensorRef(name)
    return Manifest(
        step=step,
        attempt=f"dcp-{secrets.token_hex(4)}",
        created_unix_s=time.time(),
        files=tuple(files.values()),
        tensors=tensors,
        values=plain_values(leaves, metadata.planner_data),
    )
