"""Write a committed step in another format: stock DCP, sharded safetensors, one torch.save file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt.dtypes import safetensors_form
from ckpt.fetch import fetch
from ckpt.interop.tensors import whole_tensor
from ckpt.interop.trees import tree_of, with_tensors
from ckpt.listing import find_manifest
from ckpt.manifest import Manifest
from ckpt.plan import safetensors_header
from ckpt.reading import extents_of, plan_read, wants_everything
from ckpt.stores import Store
from ftcore.base.errors import BadSetting
from ftcore.statedict import encode

Form = Literal["dcp", "safetensors", "torch"]
FORMS: tuple[Form, ...] = ("dcp", "safetensors", "torch")
Progress = Callable[[int], None]


def export(
    store: Store,
    to: str | os.PathLike[str],
    *,
    form: Form,
    step: int | None = None,
    shard_bytes_max: int = 5_000_000_000,
    only: str = "",
    progress: Progress = lambda nbytes: None,
) -> int:
    """Write `step` (or the newest) to `to`, a new local directory, and return the step.

    Every byte is checked as it is read. `only` is a prefix that is chosen and, for safetensors,
    cut off (`model.`). Writes into a hidden directory beside `to` and renames it at the end.
    """
    if form not in FORMS:
        raise BadSetting(f"{form!r} is no format", remedy=f"Choose one of {', '.join(FORMS)}.")
    target = Path(to).absolute()
    if target.exists():
        raise BadSetting(f"{target} exists", remedy="Give a directory that does not exist yet.")
    manifest = find_manifest(store, step)
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True)
    if form == "safetensors":
        write_safetensors(store, manifest, partial, shard_bytes_max, only, progress)
    else:
        with whole_state(store, manifest, only, progress) as state:
            _write_dcp(state, partial) if form == "dcp" else _write_torch(state, partial)
    os.replace(partial, target)
    return manifest.step


@contextmanager
def whole_state(
    store: Store, manifest: Manifest, only: str, progress: Progress
) -> Iterator[dict[str, Any]]:
    """The nested state with tensors that lie in the mapped files where they can."""
    names = [name for name in manifest.tensors if name.startswith(only)]
    with _tensors(store, manifest, names, progress) as tensors:
        tree = _pruned(tree_of(manifest), set(tensors)) if only else tree_of(manifest)
        yield with_tensors(tree, lambda name: tensors[name])


@contextmanager
def _tensors(
    store: Store, manifest: Manifest, names: list[str], progress: Progress
) -> Iterator[Mapping[str, torch.Tensor]]:
    chosen = set(names)
    wants = wants_everything({n: t for n, t in manifest.tensors.items() if n in chosen})
    plan = plan_read(wants, manifest, select=lambda name: name in chosen)
    extents = extents_of(plan.copies, wants, manifest)
    with fetch(store, manifest, extents, progress=progress) as image:
        tensors = {name: whole_tensor(manifest.tensors[name], image) for name in names}
        yield tensors
        tensors.clear()


def _pruned(tree: Any, names: set[str]) -> Any:
    """The tree without tensors of other names, and without what is left empty by that."""
    from ftcore.statedict.plain import TensorRef

    if isinstance(tree, TensorRef):
        return tree if tree.name in names else None
    if isinstance(tree, dict):
        kept = {k: _pruned(v, names) for k, v in tree.items()}
        return {k: v for k, v in kept.items() if isinstance(v, TensorRef | dict | list) and v}
    if isinstance(tree, list):
        kept_items = [_pruned(v, names) for v in tree]
        return kept_items if any(kept_items) else []
    return None


def _write_dcp(state: dict[str, Any], directory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=directory, no_dist=True)


def _write_torch(state: dict[str, Any], directory: Path) -> None:
    with open(directory / "state.pt", "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())


def write_safetensors(
    store: Store,
    manifest: Manifest,
    directory: Path,
    shard_bytes_max: int,
    only: str,
    progress: Progress,
) -> None:
    """Shards as Hugging Face names them, an index, and plain values in `values.json`. One shard
    at a time is read, so memory is bounded by `shard_bytes_max` or the largest tensor."""
    names = [name for name in manifest.tensors if name.startswith(only)]
    shards = list(_shards(manifest, names, shard_bytes_max))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with _tensors(store, manifest, shard, progress) as tensors:
            _write_shard(directory / file, manifest, tensors, only)
        weight_map |= {name.removeprefix(only): file for name in shard}
    total = sum(_nbytes(manifest, name) for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "values.json").write_bytes(encode(tree_of(manifest)))


def _shards(manifest: Manifest, names: list[str], bytes_max: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name in names:
        nbytes = _nbytes(manifest, name)
        if shard and size + nbytes > bytes_max:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += nbytes
    yield shard


def _nbytes(manifest: Manifest, name: str) -> int:
    from ckpt.boxes import whole
    from ckpt.dtypes import itemsize

    tensor = manifest.tensors[name]
    return whole(tensor.shape).elements * itemsize(tensor.dtype)


def _write_shard(
    path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor], only: str
) -> None:
    rows, at = [], 0
    for name, tensor in tensors.items():
        code, shape = safetensors_form(manifest.tensors[name].dtype, tuple(tensor.shape))
        rows.append((name.removeprefix(only), code, shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    with open(path, "wb") as file:
        file.write(safetensors_header(rows))
        for tensor in tensors.values():
            if tensor.nbytes:
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                file.write(memoryview(flat.numpy()))
        file.flush()
        os.fsync(file.fileno())
