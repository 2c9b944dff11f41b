"""Move checked bytes into live tensors, and plain values into live objects."""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from ckpt.boxes import Box, runs
from ckpt.dtypes import itemsize
from ckpt.fetch import Image
from ckpt.filling_cuda import Part, can_take, fill_devices, parts_of
from ckpt.manifest import Manifest
from ckpt.plan import LARGE_BYTES
from ckpt.reading import Copy, Want, byte_range
from ftcore.statedict import FlatState, PerRank, decode
from ftcore.statedict.memory import copy_in, is_plain_memory
from ftcore.statedict.plain import TensorRef

FILL_THREADS = 2
# A copy from pageable memory to a device is bound by the thread that feeds it.
DEVICE_FILL_THREADS = 8
UNIT_BYTES = 8 << 20
# A C call that keeps the interpreter lock: for 4 KB giving it up and back costs more than the copy.
_move_small = ctypes.PyDLL(None).memmove
_move_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_small.restype = ctypes.c_void_p


def fill(
    tensors: Sequence[torch.Tensor], wants: Sequence[Want], copies: Sequence[Copy], image: Image
) -> None:
    """Write every copy into its tensor, in place. `tensors` are the local ones of `wants`."""
    work: list[Callable[[], object]] = []
    strided: dict[int, list[Copy]] = {}
    parts: list[Part] = []
    plain = [is_plain_memory(tensor) for tensor in tensors]
    for copy in copies:
        index, piece, common = copy
        if not plain[index]:
            found = _device_parts(tensors[index], wants[index], copy, image)
            parts += found
            if not found:
                strided.setdefault(index, []).append(copy)
        elif common == wants[index].box == piece[3:]:
            source = image.address(piece.file, piece.offset)
            _move(tensors[index].data_ptr(), source, piece.nbytes, work)
        else:
            _move_runs(tensors[index], wants[index], copy, image, work)
    for index, pieces in strided.items():
        work.append(partial(_fill_strided, tensors[index], wants[index], pieces, image))
    on_device = any(tensors[index].is_cuda for index in strided)
    threads = min(DEVICE_FILL_THREADS, os.cpu_count() or 1) if on_device else FILL_THREADS
    with ThreadPoolExecutor(threads, "ckpt-fill") as pool:
        for done in [pool.submit(unit) for unit in work]:
            done.result()
    fill_devices(parts)  # last: a strided fill writes its whole tensor
    touched = [tensors[index] for index in {copy.want for copy in copies}]
    torch.autograd.graph.increment_version([t for t in touched if not t.is_inference()])


def _move(target: int, source: int, nbytes: int, work: list[Callable[[], object]]) -> None:
    if nbytes < LARGE_BYTES:
        _move_small(target, source, nbytes)
        return
    for at in range(0, nbytes, UNIT_BYTES):
        size = min(UNIT_BYTES, nbytes - at)
        work.append(partial(ctypes.memmove, target + at, source + at, size))


def _move_runs(
    tensor: torch.Tensor, want: Want, copy: Copy, image: Image, work: list[Callable[[], object]]
) -> None:
    for target, source, nbytes in _byte_runs(want, copy, image):
        _move(tensor.data_ptr() + target, source, nbytes, work)


def _byte_runs(want: Want, copy: Copy, image: Image) -> Iterator[tuple[int, int, int]]:
    """Where contiguous bytes go in the wanted box, their address in the image, how many."""
    size = itemsize(want.dtype)
    stored = Box(copy.piece.offsets, copy.piece.lengths)
    first, _ = byte_range(copy, want.dtype)
    origin = image.address(copy.piece.file, first) - (first - copy.piece.offset)
    for run in runs(stored, want.box, copy.common):
        yield run.target * size, origin + run.source * size, run.elements * size


def _device_parts(tensor: torch.Tensor, want: Want, copy: Copy, image: Image) -> list[Part]:
    """The copy as parts for a device; none when it is one of many short runs, or cannot be one."""
    if not can_take(tensor):
        return []
    found = list(_byte_runs(want, copy, image))
    is_short = sum(nbytes for _, _, nbytes in found) < len(found) * LARGE_BYTES
    if is_short and len(found) > 1:
        return []
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return [p for at, source, nbytes in found for p in parts_of(flat[at : at + nbytes], source)]


def _fill_strided(tensor: torch.Tensor, want: Want, copies: Sequence[Copy], image: Image) -> None:
    """A tensor elsewhere or in another order: assemble it in host memory, then copy it over."""
    only = copies[0]
    if len(copies) == 1 and only.common == want.box == (only.piece.offsets, only.piece.lengths):
        address = image.address(only.piece.file, only.piece.offset)
        bytes_there = (ctypes.c_char * only.piece.nbytes).from_address(address)
        copy_in(torch.frombuffer(bytes_there, dtype=torch.uint8), tensor)
        return
    raw = torch.empty(want.box.elements * itemsize(want.dtype), dtype=torch.uint8)
    flat = raw.view(getattr(torch, want.dtype)).view(want.box.lengths)
    work: list[Callable[[], object]] = []
    for copy in copies:
        _move_runs(flat, want, copy, image, work)
    for unit in work:
        unit()
    copy_in(raw, tensor)


# --- plain values ---------------------------------------------------------------------------------


def merged_plain(manifest: Manifest, index: int) -> Any:
    """The plain values for participant `index`: its own, completed by those of all others."""
    texts = manifest.values
    order = [str(index)] if str(index) in texts else []
    order += [key for key in texts if key not in order]
    tree: Any = None
    for key in order:
        tree = merge(tree, decode(str(texts[key]).encode("utf-8", "surrogatepass")))
    return tree


def merge(first: Any, second: Any) -> Any:
    """`first` with the keys of dicts that only `second` has."""
    if first is None:
        return second
    if isinstance(first, dict) and isinstance(second, dict):
        merged = {k: merge(v, second[k]) if k in second else v for k, v in first.items()}
        merged |= {k: v for k, v in second.items() if k not in first}
        return OrderedDict(merged) if isinstance(first, OrderedDict) else merged
    return first


def overlay(live: Any, saved: Any, take: Callable[[str], bool], path: str = "") -> Any:
    """The tree to load: `saved` where `take` says so or where only it has a value, else `live`.
    What only `live` has stays."""
    if isinstance(live, dict) and isinstance(saved, dict):
        return _overlay_dict(live, saved, take, path)
    if isinstance(live, list) and isinstance(saved, list) and len(live) == len(saved):
        pairs = zip(live, saved, strict=True)
        return [overlay(a, b, take, _join(path, i)) for i, (a, b) in enumerate(pairs)]
    if isinstance(live, TensorRef) or isinstance(saved, TensorRef):
        return live
    return saved if take(path) else live


def _overlay_dict(live: Any, saved: Any, take: Callable[[str], bool], path: str) -> Any:
    result = {}
    for key in [*live, *(k for k in saved if k not in live)]:
        here = _join(path, key)
        if key not in saved:
            result[key] = live[key]
        elif key in live:
            result[key] = overlay(live[key], saved[key], take, here)
        elif take(here) and not _has_tensor(saved[key]) and not str(key).startswith("@rank"):
            result[key] = saved[key]
    return OrderedDict(result) if isinstance(live, OrderedDict) else result


def _has_tensor(tree: Any) -> bool:
    if isinstance(tree, TensorRef):
        return True
    parts = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    return any(_has_tensor(part) for part in parts)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else f"{key}"


def without_other_ranks(tree: Any, mine: str) -> Any:
    """Top-level values of other ranks left out; ours kept only under our own key."""
    if not isinstance(tree, dict):
        return tree
    kept = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value and all(str(k).startswith("@rank") for k in value):
            value = {k: v for k, v in value.items() if k == mine}
        kept[key] = value
    return kept


def saved_optimizers(flat: FlatState) -> Callable[[], None]:
    """Return a call that gives all optimizers of a state back what they hold now."""
    kept = [
        (owner.optimizer, {k: dict(v) for k, v in owner.optimizer.state.items()})
        for _, owner in flat.optimizers()
    ]

    def give_back() -> None:
        for optimizer, state in kept:
            optimizer.state.clear()
            for parameter, values in state.items():
                optimizer.state[parameter] = values

    return give_back


def put_back(state: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    """Values that are not objects, such as numbers, are replaced in the caller's own mapping."""
    for key, value in list(state.items()):
        if isinstance(value, PerRank):
            inner = next(iter(root[key].values()), value.value)
            if inner is not value.value:
                state[key] = PerRank(value=inner)  # type: ignore[index]
        elif root[key] is not value:
            state[key] = root[key]  # type: ignore[index]
