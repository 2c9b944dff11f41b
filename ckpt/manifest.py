"""What a committed step consists of: files with checksums, tensors as boxes in them, values.

The manifest is written last: a step exists when its manifest does. FORMAT.md describes the bytes.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from ckpt.dtypes import DTYPES
from ckpt.errors import Corrupt, FormatTooNew

FORMAT_VERSION = 1
MAGIC = b"ckptman1"
_FRAME_BYTES = len(MAGIC) + 16
MANIFEST_NAME = "manifest.ckpt"
# Small enough that a resharded read of half a tensor fetches little more than it needs, large
# enough that checksums are 0.006 % of the data.
CHUNK_BYTES = 128 << 10


class Piece(NamedTuple):
    """One stored box of a tensor: `lengths` elements from `offsets`, C-contiguous in a file."""

    file: int
    offset: int
    nbytes: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Tensor(NamedTuple):
    """A whole tensor, whoever held which part of it. Two names of one tensor share its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class File(NamedTuple):
    """One stored file. `digests` are its chunks' xxh3_64, 8 bytes little-endian each."""

    key: str
    size: int
    digests: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One complete step. File keys are relative to the directory of the step."""

    step: int
    attempt: str
    created_unix_s: float
    epoch: int = 0
    participants: int = 1
    chunk_bytes: int = CHUNK_BYTES
    files: tuple[File, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        return sum(f.size for f in self.files)

    def to_bytes(self, *, columns_json: str = "") -> bytes:
        """Encode: magic, xxh3_128 of the rest, zlib-compressed JSON. `columns_json` are the tensors
        as `columns` gives them, when they are encoded already."""
        text = columns_json or _dump(columns(self.tensors))
        return frame(f'{_dump(_to_json(self))[:-1]},"tensors":{text}}}')

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, *, where: str = "manifest") -> Manifest:
        """Decode and check. Raises Corrupt when any bit differs, FormatTooNew for a later form."""
        return _from_json(unframe(data, where=where), where=where)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def frame(text: str) -> bytes:
    """Wrap JSON text so that any changed, missing or added bit is noticed."""
    body = zlib.compress(text.encode(), 1)
    return MAGIC + xxhash.xxh3_128_digest(body) + body


def unframe(data: bytes | memoryview, *, where: str) -> dict[str, object]:
    data = bytes(data)
    digest, body = data[len(MAGIC) : _FRAME_BYTES], data[_FRAME_BYTES:]
    if data[: len(MAGIC)] != MAGIC or xxhash.xxh3_128_digest(body) != digest:
        raise Corrupt(f"{where}: {len(data)} bytes that do not match their checksum", where=where)
    content = json.loads(zlib.decompress(body))
    if not isinstance(content, dict):
        raise Corrupt(f"{where}: is not a JSON object", where=where)
    return content


def step_directory(step: int) -> str:
    """Name of the directory of a step: sorts by step up to ten digits."""
    return f"step-{step:010d}"


def step_of(directory: str) -> int | None:
    """The step of a directory name, or None if it is not one of ours."""
    digits = directory.removeprefix("step-")
    return int(digits) if digits != directory and len(digits) >= 10 and digits.isdigit() else None


def manifest_key(step: int) -> str:
    return f"{step_directory(step)}/{MANIFEST_NAME}"


def columns(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Tensors as columns: small, and quick to write and read at 20,000 names."""
    pieces = [
        [index, p.file, p.offset, p.nbytes, *p.offsets, *p.lengths]
        for index, tensor in enumerate(tensors.values())
        for p in tensor.pieces
    ]
    return {
        "names": list(tensors),
        "dtypes": [t.dtype for t in tensors.values()],
        "shapes": [t.shape for t in tensors.values()],
        "pieces": pieces,
    }


def from_columns(content: Mapping[str, list]) -> dict[str, Tensor]:  # type: ignore[type-arg]
    shapes = [tuple(s) for s in content["shapes"]]
    pieces: list[list[Piece]] = [[] for _ in shapes]
    for index, file, offset, nbytes, *box in content["pieces"]:
        rank = len(shapes[index])
        pieces[index].append(Piece(file, offset, nbytes, tuple(box[:rank]), tuple(box[rank:])))
    rows = zip(content["names"], content["dtypes"], shapes, pieces, strict=True)
    return {name: Tensor(dtype, shape, tuple(parts)) for name, dtype, shape, parts in rows}


def files_to_json(files: Iterable[File]) -> list[list[object]]:
    return [[f.key, f.size, base64.b64encode(f.digests).decode()] for f in files]


def files_from_json(rows: Iterable[list[object]]) -> tuple[File, ...]:
    return tuple(File(str(k), int(s), base64.b64decode(str(d))) for k, s, d in rows)  # type: ignore[call-overload]


def _to_json(manifest: Manifest) -> dict[str, object]:
    return {
        "format": FORMAT_VERSION,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "epoch": manifest.epoch,
        "created_unix_s": manifest.created_unix_s,
        "participants": manifest.participants,
        "chunk_bytes": manifest.chunk_bytes,
        "files": files_to_json(manifest.files),
        "values": dict(manifest.values),
        "metrics": dict(manifest.metrics),
    }


def _from_json(content: Mapping[str, object], *, where: str) -> Manifest:
    version = content.get("format")
    if version != FORMAT_VERSION:
        raise FormatTooNew(f"{where}: has format {version}, this reads {FORMAT_VERSION}")
    fields = {k: v for k, v in content.items() if k not in ("format", "files", "tensors")}
    files = files_from_json(content["files"])  # type: ignore[arg-type]
    tensors = from_columns(content["tensors"])  # type: ignore[arg-type]
    unknown = {t.dtype for t in tensors.values()} - set(DTYPES)
    if unknown:
        raise FormatTooNew(f"{where}: has tensors of unknown types {sorted(unknown)}")
    return Manifest(files=files, tensors=tensors, **fields)  # type: ignore[arg-type]
