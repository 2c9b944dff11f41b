"""What the command line does with checkpoints: list, verify, compare, copy, prune. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ckpt.errors import Corrupt
from ckpt.fetch import check_sizes, read_tensors, verify_extents
from ckpt.listing import newest_first, read_manifest
from ckpt.manifest import Manifest, manifest_key, step_directory
from ckpt.reading import Extent
from ckpt.stores import Outcome, Store, Upload
from ftcore.base.errors import FtError

Progress = Callable[[int], None]
VERIFY_THREADS = 8
COPY_PART_BYTES = 64 << 20
_NUMPY = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One line of `ckpt ls`."""

    step: int
    created_unix_s: float
    bytes: int
    tensors: int
    files: int
    participants: int
    metrics: dict[str, float] = field(default_factory=dict)
    pinned: bool = False
    problem: str = ""


def list_steps(store: Store) -> list[StepLine]:
    """Complete steps, oldest first. A manifest that cannot be read is listed with its problem."""
    pins = {int(info.key.removeprefix("pins/")) for info in store.list("pins/")}
    lines = []
    for step in sorted(newest_first(store)):
        try:
            m = read_manifest(store, step)
        except FtError as error:
            lines.append(
                StepLine(
                    step=step,
                    created_unix_s=0.0,
                    bytes=0,
                    tensors=0,
                    files=0,
                    participants=0,
                    problem=str(error),
                )
            )
            continue
        lines.append(
            StepLine(
                step=step,
                created_unix_s=m.created_unix_s,
                bytes=m.stored_bytes,
                tensors=len(m.tensors),
                files=len(m.files),
                participants=m.participants,
                metrics=dict(m.metrics),
                pinned=step in pins,
            )
        )
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found of one step."""

    step: int
    bytes_checked: int
    problems: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not self.problems


def verify(
    store: Store, step: int, *, deep: bool, progress: Progress = lambda nbytes: None
) -> Verdict:
    """Check the manifest and the size of every file; `deep` reads every byte as well."""
    try:
        manifest = read_manifest(store, step)
    except FtError as error:
        return Verdict(step=step, bytes_checked=0, problems=(str(error),))
    numbers = range(len(manifest.files))
    problems: list[str] = []
    for number in numbers:
        try:
            check_sizes(store, manifest, [number])
        except FtError as error:
            problems.append(str(error))
    checked = 0
    if deep and not problems:
        found: list[Corrupt] = []
        extents = [Extent(n, 0, manifest.files[n].size) for n in numbers]
        verify_extents(
            store,
            manifest,
            extents,
            threads=VERIFY_THREADS,
            progress=progress,
            keep_going=found,
        )
        problems += [str(error) for error in found]
        checked = manifest.stored_bytes
    return Verdict(step=step, bytes_checked=checked, problems=tuple(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which two steps differ."""

    name: str
    kind: str  # "only in A", "only in B", "type", "shape", "values"
    detail: str
    largest: float = 0.0


def diff(
    a: tuple[Store, Manifest], b: tuple[Store, Manifest], *, progress: Progress = lambda n: None
) -> list[Difference]:
    """Compare all tensors of two steps, in batches of bounded memory."""
    left, right = a[1].tensors, b[1].tensors
    found = [Difference(name=n, kind="only in A", detail="") for n in left if n not in right]
    found += [Difference(name=n, kind="only in B", detail="") for n in right if n not in left]
    both = []
    for name in left:
        if name not in right:
            continue
        x, y = left[name], right[name]
        if x.dtype != y.dtype:
            found.append(Difference(name=name, kind="type", detail=f"{x.dtype} and {y.dtype}"))
        elif x.shape != y.shape:
            found.append(
                Difference(name=name, kind="shape", detail=f"{list(x.shape)} and {list(y.shape)}")
            )
        else:
            both.append(name)
    for names in _batches(both, a[1]):
        mine, theirs = read_tensors(*a, names), read_tensors(*b, names)
        for name in names:
            difference = compare(name, left[name].dtype, mine[name], theirs[name])
            progress(len(mine[name]))
            if difference is not None:
                found.append(difference)
    return found


def _batches(
    names: Iterable[str], manifest: Manifest, limit: int = 256 << 20
) -> Iterable[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        nbytes = sum(p.nbytes for p in manifest.tensors[name].pieces)
        if batch and size + nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch


def compare(name: str, dtype: str, a: memoryview, b: memoryview) -> Difference | None:
    """None when the bytes are equal; else how many elements differ and by how much at most."""
    if a == b:
        return None
    if dtype == "bfloat16":
        x, y = (_from_bfloat16(v) for v in (a, b))
    elif dtype in _NUMPY:
        x, y = (np.frombuffer(v, _NUMPY[dtype]) for v in (a, b))
    else:
        count = int((np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)).sum())
        return Difference(name=name, kind="values", detail=f"{count} bytes of {dtype} differ")
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    with np.errstate(invalid="ignore"):
        gap = np.abs(x.astype(wide) - y.astype(wide))
    count = int((x != y).sum())
    largest = float(np.nanmax(gap)) if count and not np.isnan(gap).all() else float("nan")
    detail = f"{count} of {x.size} elements differ, by at most {largest:.6g}"
    return Difference(name=name, kind="values", detail=detail, largest=largest)


def _from_bfloat16(data: memoryview) -> np.ndarray[Any, Any]:
    wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    floats: np.ndarray[Any, Any] = wide.view(np.float32)
    return floats


def copy_step(
    source: Store, target: Store, step: int, *, progress: Progress = lambda nbytes: None
) -> Manifest:
    """Copy one step: every byte checked on the way, the manifest last."""
    manifest = read_manifest(source, step)
    directory = step_directory(step)
    for number, file in enumerate(manifest.files):
        key = f"{directory}/{file.key}"
        with target.start_upload(key, file.size) as upload:
            per_batch = max(1, COPY_PART_BYTES // upload.part_bytes)
            size = per_batch * upload.part_bytes
            for start in range(0, file.size, size):
                data = memoryview(bytearray(min(size, file.size - start)))
                source.get_into(key, data, offset=start)
                _send(target, upload, data, start // upload.part_bytes)
                progress(len(data))
            upload.finish()
        verify_extents(target, manifest, [Extent(number, 0, file.size)], threads=VERIFY_THREADS)
    data_of_manifest = source.get(manifest_key(step))
    if target.put_if_absent(manifest_key(step), data_of_manifest) is Outcome.EXISTS:
        target.put(manifest_key(step), data_of_manifest)
    return manifest


def _send(target: Store, upload: Upload, data: memoryview, first: int) -> None:
    step = upload.part_bytes
    parts = [(first + i, data[at : at + step]) for i, at in enumerate(range(0, len(data), step))]
    target.run_parallel([partial(upload.put_part, *part) for part in parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Files in step directories that no manifest names."""

    keys: tuple[str, ...]
    bytes: int


def find_leftovers(store: Store, *, older_than_s: float, now_s: float) -> Leftovers:
    """Files of saves that were never committed, at least this old."""
    named: set[str] = set()
    for step in newest_first(store):
        try:
            manifest = read_manifest(store, step)
        except FtError:  # damaged: keep its files, they may be all that is left
            named.update(i.key for i in store.list(f"{step_directory(step)}/"))
            continue
        named.add(manifest_key(step))
        named.update(f"{step_directory(step)}/{f.key}" for f in manifest.files)
    found = [
        info
        for info in store.list("step-")
        if info.key not in named and now_s - info.modified_s >= older_than_s
    ]
    return Leftovers(keys=tuple(i.key for i in found), bytes=sum(i.size_bytes for i in found))


def remove_steps(store: Store, steps: Sequence[int]) -> None:
    """Delete steps, each one's manifest first, so that no reader finds half of it complete."""
    for step in steps:
        store.delete([manifest_key(step)])
        store.delete([info.key for info in store.list(f"{step_directory(step)}/")])
