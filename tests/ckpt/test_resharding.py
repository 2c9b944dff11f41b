"""Any cut of a state into boxes loads into any other cut: random layouts, without processes."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.assemble import Part, Whole, assemble
from ckpt.boxes import Box
from ckpt.hashing import chunk_digests
from ckpt.manifest import CHUNK_BYTES, File, Manifest
from ckpt.plan import Item, plan
from ckpt.reading import Want, plan_read

SIZES = st.integers(0, 7)


@st.composite
def cuts(draw, length):
    """Borders that cut a dimension into 1 to 4 parts, of which some may be empty."""
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    return [0, *sorted(inner), length]


@st.composite
def meshes(draw, shape):
    """The boxes of all ranks: every dimension cut at random, each rank one cell."""
    borders = [draw(cuts(length)) for length in shape]
    boxes = [Box((), ())]
    for edges in borders:
        parts = list(pairwise(edges))
        boxes = [Box((*b.offsets, a), (*b.lengths, e - a)) for b in boxes for a, e in parts]
    return boxes


@st.composite
def reshardings(draw):
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    return shape, draw(meshes(shape)), draw(meshes(shape))


def values(shape):
    return np.arange(int(np.prod(shape, dtype=int)), dtype=np.float32).reshape(shape)


def cut(array, box):
    slices = (slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
    return array[(*slices, ...)]


def saved(shape, boxes):
    """The manifest and the files of a save by as many ranks as there are boxes."""
    parts, images = {}, {}
    for rank, box in enumerate(boxes):
        items = [Item("w", "float32", shape, box)] if box.elements or box.lengths == shape else []
        layout, files = plan(items), {}
        for number, file in enumerate(layout.files):
            image = bytearray(file.size)
            for member in file.members:
                raw = np.ascontiguousarray(cut(values(shape), box)).tobytes()
                image[member.offset : member.offset + len(raw)] = raw
            key = f"{rank}-{number}"
            images[key] = bytes(image)
            files[number] = File(key, len(image), chunk_digests(memoryview(image)))
        parts[rank] = Part(index=rank, layout=layout, files=files)
    whole = assemble(parts, count=len(boxes), dead={})
    assert isinstance(whole, Whole), whole
    manifest = Manifest(
        step=1,
        attempt="a.1",
        created_unix_s=0.0,
        participants=len(boxes),
        files=whole.files,
        tensors=whole.tensors,
        values={},
        metrics={},
    )
    return manifest, images


def loaded(manifest, images, shape, box):
    """What a rank with this box reads, through nothing but the plan."""
    want = Want("w", "float32", shape, box)
    reading = plan_read([want], manifest)
    assert reading.report.is_exact, reading.report.describe()
    found = np.full(box.lengths, -1, dtype=np.float32)
    for copy in reading.copies:
        piece = copy.piece
        image = only(images[manifest.files[piece.file].key], reading.extents, piece.file)
        stored = np.frombuffer(image, np.float32, piece.nbytes // 4, piece.offset)
        stored = stored.reshape(piece.lengths)
        common = copy.common
        source = Box(_minus(common.offsets, piece.offsets), common.lengths)
        target = Box(_minus(common.offsets, box.offsets), common.lengths)
        cut(found, target)[...] = cut(stored, source)
    return found, reading


def only(image, extents, number):
    """The file as a reader has it: nothing but what was planned to be read."""
    read = bytearray(b"\xff") * len(image)
    for extent in extents:
        if extent.file == number:
            read[extent.start : extent.end] = image[extent.start : extent.end]
    return bytes(read)


def _minus(a, b):
    return tuple(x - y for x, y in zip(a, b, strict=True))


@settings(max_examples=300, deadline=None)
@given(reshardings())
def test_every_rank_of_the_new_layout_gets_exactly_its_box(case):
    shape, old, new = case
    if not any(b.elements for b in old) and values(shape).size:
        return
    manifest, images = saved(shape, old)
    if "w" not in manifest.tensors:
        return  # every rank had an empty shard of an empty tensor
    for box in new:
        found, _ = loaded(manifest, images, shape, box)
        assert (found == cut(values(shape), box)).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8))
def test_only_the_chunks_that_a_rank_needs_are_read(old, new):
    """Rows of 4 KB: what is read is at most what is needed and one chunk at each border."""
    shape = (1024, 1024)
    manifest, images = saved(shape, rows(shape, old))
    for box in rows(shape, new):
        found, reading = loaded(manifest, images, shape, box)
        assert (found == cut(values(shape), box)).all()
        assert reading.bytes <= box.elements * 4 + 2 * (old + 1) * CHUNK_BYTES


def rows(shape, ranks):
    edges = [shape[0] * i // ranks for i in range(ranks + 1)]
    return [Box((a, 0), (e - a, shape[1])) for a, e in pairwise(edges)]
