"""Decide where each tensor lies in files and in the staging pool, and who writes which file.

A file image is laid out once and is the same in staging memory, in a peer's memory and in a store:
a safetensors header padded to 4 KB, large tensors at 4 KB-aligned offsets, then small ones packed.
A file is the unit of writing, of sharing among replicas, and of taking over from a dead one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import xxhash

from ckpt.boxes import Box, whole
from ckpt.dtypes import itemsize, safetensors_form

ALIGN = 4096
# A tensor at least this large gets a 4 KB-aligned start; the padding costs at most 1/16 of it.
LARGE_BYTES = 64 << 10
FILE_BYTES_MIN, FILE_BYTES_MAX, FILES_PER_SAVE = 256 << 20, 4 << 30, 32


class Share(NamedTuple):
    """A class of tensors of which `copies` participants hold equal copies. `label` is the same on
    all of them; which of the copies a participant has is no part of the layout."""

    label: str
    copies: int


ALONE = Share("", 1)


class Item(NamedTuple):
    """A box of a tensor that one participant holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    share: Share = ALONE

    @property
    def nbytes(self) -> int:
        return self.box.elements * itemsize(self.dtype)

    @property
    def key(self) -> str:
        """Its name in a safetensors header: the tensor's name, with the box unless it is whole."""
        if self.box == whole(self.shape):
            return self.name
        ranges = zip(self.box.offsets, self.box.lengths, strict=True)
        return f"{self.name}[{','.join(f'{o}:{o + n}' for o, n in ranges)}]"


class Member(NamedTuple):
    """An item and where its bytes start in the file."""

    item: Item
    offset: int


class FilePlan(NamedTuple):
    """One file image: `header` up to `data_start`, then members, `size` bytes in all (a multiple
    of 4 KB). A layout that came over a wire has no headers: they are in the images."""

    share: Share
    owner: int
    data_start: int
    size: int
    members: tuple[Member, ...]
    header: bytes = b""


def is_owner(file: FilePlan, copies: Mapping[str, int]) -> bool:
    """Whether the participant that holds these copies of replicated tensors writes `file`."""
    return copies.get(file.share.label, 0) == file.owner


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All files of what one participant holds. `aliases` are second names of the same bytes."""

    files: tuple[FilePlan, ...]
    digest: str
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def pool_offsets(self) -> tuple[int, ...]:
        """Where each file image starts in a staging slot that holds all of them."""
        offsets = [0]
        for file in self.files:
            offsets.append(offsets[-1] + file.size)
        return tuple(offsets[:-1])

    @property
    def pool_bytes(self) -> int:
        return sum(f.size for f in self.files)

    @cached_property
    def data_bytes(self) -> int:
        return sum(m.item.nbytes for f in self.files for m in f.members)


def plan(
    items: Sequence[Item],
    *,
    aliases: Sequence[tuple[str, str]] = (),
    file_bytes_max: int | None = None,
) -> Layout:
    """Lay out `items`. The same items in the same order give the same layout on every host."""
    limit = file_bytes_max or file_bytes_for(sum(i.nbytes for i in items))
    files: list[FilePlan] = []
    for share in sorted({i.share for i in items}):
        mine = [i for i in items if i.share == share]
        for owner, part in enumerate(deal(mine, share.copies, limit)):
            files += [_file(share, owner, group) for group in pack(part, limit)]
    return Layout(files=tuple(files), digest=_digest(files, aliases), aliases=tuple(aliases))


def file_bytes_for(total: int) -> int:
    """Few files, yet enough that hashing, writing and staging of different ones overlap."""
    return min(max(total // FILES_PER_SAVE, FILE_BYTES_MIN), FILE_BYTES_MAX)


def deal(items: Sequence[Item], count: int, limit: int) -> list[list[Item]]:
    """Deal items to `count` owners so that each gets about the same bytes."""
    total = sum(i.nbytes for i in items)
    grain = limit if count == 1 else min(limit, max(total // (4 * count), 4 << 20))
    parts = [p for i in items for p in split(i, grain)]
    if count == 1:
        return [parts]
    dealt: list[list[Item]] = [[] for _ in range(count)]
    loads = [0] * count
    for part in sorted(parts, key=lambda p: -p.nbytes):
        owner = loads.index(min(loads))
        dealt[owner].append(part)
        loads[owner] += part.nbytes
    return dealt


def split(item: Item, bytes_max: int) -> list[Item]:
    """Cut an item into boxes of at most `bytes_max`, along its first dimensions."""
    if item.nbytes <= bytes_max:
        return [item]
    dim = next(d for d, n in enumerate(item.box.lengths) if n > 1)
    row = item.nbytes // item.box.lengths[dim]
    rows = max(1, bytes_max // row)
    parts = [_cut(item, dim, at, rows) for at in range(0, item.box.lengths[dim], rows)]
    return [p for part in parts for p in (split(part, bytes_max) if rows == 1 else [part])]


def _cut(item: Item, dim: int, at: int, rows: int) -> Item:
    offsets, lengths = list(item.box.offsets), list(item.box.lengths)
    offsets[dim] += at
    lengths[dim] = min(rows, lengths[dim] - at)
    return item._replace(box=Box(tuple(offsets), tuple(lengths)))


def pack(items: Iterable[Item], limit: int) -> list[list[Item]]:
    """Group items into files of at most `limit` bytes: large ones in order, then small ones by
    falling element size, so that every one is aligned to its elements without holes."""
    large = [i for i in items if i.nbytes >= LARGE_BYTES]
    small = [i for i in items if i.nbytes < LARGE_BYTES]
    groups: list[list[Item]] = []
    room = 0
    for item in large + sorted(small, key=lambda i: -itemsize(i.dtype)):
        if item.nbytes > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= item.nbytes
    return groups


def _file(share: Share, owner: int, items: Sequence[Item]) -> FilePlan:
    entries, at = [], 0
    placed: list[tuple[Item, int]] = []
    for item in items:
        if item.nbytes >= LARGE_BYTES and at % ALIGN:
            entries.append(_pad(at, -at % ALIGN))
            at += -at % ALIGN
        placed.append((item, at))
        code, shape = safetensors_form(item.dtype, item.box.lengths)
        entries.append((item.key, code, shape, at, at + item.nbytes))
        at += item.nbytes
    if at % ALIGN:
        entries.append(_pad(at, -at % ALIGN))
        at += -at % ALIGN
    header = safetensors_header(entries)
    members = tuple(Member(item, len(header) + offset) for item, offset in placed)
    return FilePlan(share, owner, len(header), len(header) + at, members, header)


def _pad(at: int, nbytes: int) -> tuple[str, str, tuple[int, ...], int, int]:
    """Safetensors allows no holes, so padding is a tensor too. Readers skip `__pad__`."""
    return f"__pad__.{at}", "U8", (nbytes,), at, at + nbytes


def safetensors_header(
    entries: Iterable[tuple[str, str, tuple[int, ...], int, int]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The header of a safetensors file, padded with spaces so that data starts at 4 KB."""
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for key, code, shape, start, end in entries:
        table[key] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _digest(files: Sequence[FilePlan], aliases: Sequence[tuple[str, str]]) -> str:
    """What two participants with equal layouts have in common; file contents are no part of it."""
    hasher = xxhash.xxh3_128(repr(tuple(aliases)).encode())
    for file in files:
        hasher.update(f"{file.share.label}\0{file.share.copies}\0{file.owner}\0".encode())
        hasher.update(file.header)
        shapes = [(m.item.dtype, m.item.shape, m.item.box) for m in file.members]
        hasher.update(repr(shapes).encode())
    return hasher.hexdigest()


def layout_to_json(layout: Layout) -> dict[str, object]:
    """What a daemon and other participants need: no headers, those are in the file images."""
    return {
        "digest": layout.digest,
        "aliases": layout.aliases,
        "files": [[*f.share, f.owner, f.data_start, f.size] for f in layout.files],
        "members": [
            [index, m.item.name, m.item.dtype, m.item.shape, *m.item.box, m.offset]
            for index, f in enumerate(layout.files)
            for m in f.members
        ],
    }


def layout_from_json(content: Mapping[str, list]) -> Layout:  # type: ignore[type-arg]
    """The inverse, without headers."""
    members: list[list[Member]] = [[] for _ in content["files"]]
    for index, name, dtype, shape, offsets, lengths, offset in content["members"]:
        box = Box(tuple(offsets), tuple(lengths))
        label, count = content["files"][index][:2]
        item = Item(name, dtype, tuple(shape), box, Share(label, count))
        members[index].append(Member(item, offset))
    files = [
        FilePlan(Share(label, count), owner, start, size, tuple(parts))
        for (label, count, owner, start, size), parts in zip(content["files"], members, strict=True)
    ]
    aliases = tuple((name, target) for name, target in content["aliases"])
    return Layout(files=tuple(files), digest=str(content["digest"]), aliases=aliases)
