"""Boxes: against numpy, whatever the shapes."""

import random

import numpy as np
import pytest

from ckpt.boxes import Box, missing_elements, overlap, runs, whole


def random_box(rng, shape):
    offsets = tuple(rng.randint(0, n) for n in shape)
    return Box(offsets, tuple(rng.randint(0, n - o) for n, o in zip(shape, offsets, strict=True)))


def cut(array, box):
    index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
    return array[index] if index else array


@pytest.mark.parametrize("seed", range(300))
def test_runs_move_exactly_the_overlap(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 4)))
    full = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    source, target = random_box(rng, shape), random_box(rng, shape)
    stored = np.ascontiguousarray(cut(full, source)).reshape(-1)
    found = np.full(target.elements, -1)
    common = overlap(source, target)
    for run in runs(source, target, common) if common else ():
        found[run.target : run.target + run.elements] = stored[
            run.source : run.source + run.elements
        ]
    inside = np.isin(cut(full, target), stored).reshape(-1)
    expected = np.where(inside, cut(full, target).reshape(-1), -1)
    assert (found == expected).all()


def test_halving_along_the_first_dimension_is_one_run():
    half = Box((4, 0, 0), (4, 3, 2))
    assert len(list(runs(whole((8, 3, 2)), half, half))) == 1


@pytest.mark.parametrize("seed", range(200))
def test_missing_elements_are_those_no_box_holds(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3)))
    held = np.zeros(shape, dtype=bool)
    boxes = [random_box(rng, shape) for _ in range(rng.randint(0, 4))]
    for box in boxes:
        cut(held, box)[...] = True
    assert missing_elements(shape, boxes) == int((~held).sum())
