"""Decide whether what the participants of a save wrote makes a whole step, or who must write more.

Pure: every daemon that sees the same parts decides the same, so no participant leads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field

from ckpt.boxes import Box, missing_elements, overlap, subtract, whole
from ckpt.manifest import File, Piece, Tensor, columns
from ckpt.plan import FilePlan, Item, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one participant wrote of a step: some files of its layout, and its plain values."""

    index: int
    layout: Layout
    files: Mapping[int, File]
    plain: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Every tensor is covered: the step can be committed."""

    files: tuple[File, ...]
    tensors: Mapping[str, Tensor]
    columns: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """These participants hold what is missing and should write these files of their layouts."""

    files: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """These participants have not said what they hold or wrote."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """Nobody who is alive can complete this step."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """What a set of written files makes of a set of layouts; the same for every step that is
    written alike. `order` lists the files as (participant, number)."""

    order: tuple[tuple[int, int], ...]
    tensors: Mapping[str, Tensor]
    gaps: Mapping[str, list[Box]]
    columns: str  # of the tensors, as the manifest has them


CoverKey = tuple[tuple[int, str, tuple[int, ...]], ...]


def cover_key(parts: Mapping[int, Part], dead: Mapping[int, Layout | None]) -> CoverKey:
    """Equal keys have equal covers."""
    written = [(i, p.layout.digest, tuple(sorted(p.files))) for i, p in parts.items()]
    nothing: tuple[int, ...] = ()
    lost = [(i, v.digest, nothing) for i, v in dead.items() if v is not None and i not in parts]
    return tuple(sorted(written + lost))


def assemble(
    parts: Mapping[int, Part],
    *,
    count: int,
    dead: Mapping[int, Layout | None],
    covers: MutableMapping[CoverKey, Cover] | None = None,
    here: Iterable[int] | None = None,
) -> Whole | Fill | Waiting | Impossible:
    """Decide about a step of `count` participants. `dead` ones write no more; their layouts say
    what they held, None that nobody knows. `covers` remembers what was worked out before.

    With `here` only these participants of one host count, for a disk that only they see: what
    nobody among them holds is no part of the step.
    """
    expected = range(count) if here is None else here
    missing = tuple(i for i in expected if i not in parts and i not in dead)
    if missing:
        return Waiting(missing=missing)
    unknown = [i for i in dead if i not in parts and dead[i] is None]
    if unknown:
        return Impossible(reason=f"participants {unknown} died and nobody knows what they held")
    covers = {} if covers is None else covers
    key = cover_key(parts, dead)
    cover = covers.get(key)
    if cover is None:
        found = _cover(parts, dead)
        if isinstance(found, Impossible):
            return found
        cover = covers[key] = found
    if cover.gaps:
        filled = _fill(
            parts,
            cover.gaps,
            alive=[i for i in sorted(parts) if i not in dead],
            may_lack=here is not None,
        )
        if here is None or isinstance(filled, Fill):
            return filled
    files = tuple(parts[i].files[n] for i, n in cover.order)
    return Whole(files=files, tensors=cover.tensors, columns=cover.columns)


def _cover(parts: Mapping[int, Part], dead: Mapping[int, Layout | None]) -> Cover | Impossible:
    layouts = {i: p.layout for i, p in parts.items()} | {
        i: known for i, known in dead.items() if known is not None and i not in parts
    }
    shapes = shapes_of(layouts)
    if isinstance(shapes, Impossible):
        return shapes
    order, pieces = written(parts)
    gaps = {
        name: boxes
        for name, (_, shape) in shapes.items()
        if (boxes := _gaps(shape, pieces.get(name, ())))
    }
    tensors = tensors_of(shapes, pieces, layouts.values())
    text = json.dumps(columns(tensors), separators=(",", ":"), ensure_ascii=False)
    return Cover(order=order, tensors=tensors, gaps=gaps, columns=text)


def tensors_of(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    pieces: Mapping[str, Mapping[Box, Piece]],
    layouts: Iterable[Layout],
) -> dict[str, Tensor]:
    """Every tensor with its pieces; second names share the pieces of the first."""
    tensors = {
        name: Tensor(dtype, shape, tuple(pieces.get(name, {}).values()))
        for name, (dtype, shape) in shapes.items()
    }
    for layout in layouts:
        tensors |= {name: tensors[target] for name, target in layout.aliases}
    return tensors


def shapes_of(
    layouts: Mapping[int, Layout],
) -> dict[str, tuple[str, tuple[int, ...]]] | Impossible:
    """Type and global shape by name; participants must agree on them."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    seen: set[str] = set()
    for index in sorted(layouts):
        if layouts[index].digest in seen:
            continue
        seen.add(layouts[index].digest)
        for item in _items(layouts[index]):
            mine = (item.dtype, item.shape)
            other = shapes.setdefault(item.name, mine)
            if other != mine:
                return Impossible(
                    reason=f"{item.name} is {mine[0]}{list(mine[1])} on participant {index} and "
                    f"{other[0]}{list(other[1])} on another"
                )
    return shapes


def _items(layout: Layout) -> Iterable[Item]:
    return (member.item for file in layout.files for member in file.members)


def written(
    parts: Mapping[int, Part],
) -> tuple[tuple[tuple[int, int], ...], dict[str, dict[Box, Piece]]]:
    """All files in order, and by name the pieces in them; of two equal boxes the first counts."""
    order: list[tuple[int, int]] = []
    pieces: dict[str, dict[Box, Piece]] = {}
    for index in sorted(parts):
        part = parts[index]
        for number in sorted(part.files):
            for member in part.layout.files[number].members:
                item = member.item
                piece = Piece(len(order), member.offset, item.nbytes, *item.box)
                pieces.setdefault(item.name, {}).setdefault(item.box, piece)
            order.append((index, number))
    return tuple(order), pieces


def _gaps(shape: tuple[int, ...], boxes: Iterable[Box]) -> list[Box]:
    """What of a tensor of `shape` is in no box."""
    boxes = tuple(boxes)
    full = whole(shape)
    if full in boxes or not missing_elements(shape, boxes):
        return []
    left = [full]
    for box in boxes:
        left = [rest for part in left for rest in subtract(part, box)]
    return left


def _fill(
    parts: Mapping[int, Part],
    gaps: Mapping[str, list[Box]],
    *,
    alive: Iterable[int],
    may_lack: bool,
) -> Fill | Impossible:
    left = {name: list(boxes) for name, boxes in gaps.items()}
    asked: dict[int, list[int]] = {}
    for index in alive:
        for number, file in enumerate(parts[index].layout.files):
            if number not in parts[index].files and _helps(file, left):
                asked.setdefault(index, []).append(number)
                _take(file, left)
    if left and not (may_lack and asked):
        return Impossible(reason=f"{len(left)} tensors have parts that died, such as {min(left)}")
    return Fill(files={i: tuple(numbers) for i, numbers in asked.items()})


def _helps(file: FilePlan, left: Mapping[str, list[Box]]) -> bool:
    return any(
        overlap(m.item.box, gap) is not None
        for m in file.members
        for gap in left.get(m.item.name, ())
    )


def _take(file: FilePlan, left: dict[str, list[Box]]) -> None:
    for member in file.members:
        boxes = left.get(member.item.name)
        if boxes is None:
            continue
        rest = [r for gap in boxes for r in subtract(gap, member.item.box)]
        if rest:
            left[member.item.name] = rest
        else:
            del left[member.item.name]
