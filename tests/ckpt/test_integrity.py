"""Whatever happens to the bytes: damage is found, nothing changes, an older step loads."""

import os
import random
import shutil

import pytest

from ckpt import Checkpointer
from ckpt.errors import CheckpointError
from tests.ckpt.conftest import make_state, same, snapshot


def restored(run, **options):
    """Restore into a fresh state; returns (step, state before, state after, tries passed over)."""
    state = make_state(50)
    before = snapshot(state)
    with Checkpointer(run.path, inline=True) as checkpoints:
        try:
            step = checkpoints.restore(state, **options)
        except CheckpointError as error:
            return error, before, snapshot(state)
    return step, before, snapshot(state)


def assert_falls_back(run):
    step, _, after = restored(run)
    assert step == 1
    assert same(after, run.saved[1])


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ 1 << bit % 8
        file.seek(bit // 8)
        file.write(bytes([byte]))


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_anywhere_in_a_step_makes_the_step_before_it_load(run, seed):
    rng = random.Random(seed)
    path = rng.choice([*run.files(2), run.manifest(2)])
    flip(path, rng.randrange(path.stat().st_size * 8))
    assert_falls_back(run)


def test_a_flipped_bit_leaves_the_state_untouched_when_no_other_step_is_asked(run):
    flip(run.files(2)[0], run.files(2)[0].stat().st_size * 8 - 4096 * 8)
    error, before, after = restored(run, step=2)
    assert "not as written" in str(error)
    assert same(before, after)


def test_when_every_step_is_damaged_the_error_says_so_and_nothing_changes(run):
    for step in (1, 2):
        flip(run.files(step)[0], 100_000)
    error, before, after = restored(run)
    assert isinstance(error, CheckpointError)
    assert same(before, after)


@pytest.mark.parametrize("cut", [1, 4096, 10_000_000])
def test_a_truncated_file_is_noticed(run, cut):
    path = run.files(2)[0]
    os.truncate(path, max(0, path.stat().st_size - cut))
    assert_falls_back(run)


def test_a_zeroed_page_is_noticed(run):
    with open(run.files(2)[0], "r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    assert_falls_back(run)


def test_a_missing_file_is_noticed(run):
    run.files(2)[0].unlink()
    assert_falls_back(run)


def test_a_file_of_another_step_in_its_place_is_noticed(run):
    shutil.copy(run.files(1)[0], run.files(2)[0])
    assert_falls_back(run)


def test_a_truncated_manifest_is_noticed(run):
    os.truncate(run.manifest(2), run.manifest(2).stat().st_size // 2)
    assert_falls_back(run)


def test_a_step_without_a_manifest_does_not_exist(run):
    run.manifest(2).unlink()
    assert_falls_back(run)


def test_the_manifest_of_another_step_is_not_believed(run):
    shutil.copy(run.manifest(1), run.manifest(2))
    assert_falls_back(run)
