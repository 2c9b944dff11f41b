"""The manifest: what is written is what is read, and any changed bit is noticed."""

import random

import pytest

from ckpt.errors import Corrupt, FormatTooNew
from ckpt.manifest import File, Manifest, Piece, Tensor, frame, manifest_key, step_of

MANIFEST = Manifest(
    step=7,
    attempt="a1b2.1",
    created_unix_s=1.5,
    participants=2,
    files=(File("a1b2.1-p0-0-ff.safetensors", 8192, b"\x01" * 8),),
    tensors={
        "model.w": Tensor("float32", (4, 2), (Piece(0, 4096, 32, (0, 0), (4, 2)),)),
        "step": Tensor("int64", (), (Piece(0, 4128, 8, (), ()),)),
        "empty": Tensor("bfloat16", (0, 3), ()),
    },
    values={"extra.epoch": 3},
    metrics={"loss": 0.5},
)


def test_a_manifest_reads_back_equal():
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_any_flipped_bit_is_corrupt():
    data = MANIFEST.to_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            Manifest.from_bytes(flipped)


@pytest.mark.parametrize("seed", range(50))
def test_a_cut_or_longer_manifest_is_corrupt(seed):
    rng = random.Random(seed)
    data = MANIFEST.to_bytes()
    for damaged in (data[: rng.randrange(len(data))], data + rng.randbytes(rng.randint(1, 9))):
        with pytest.raises(Corrupt):
            Manifest.from_bytes(damaged)


def test_a_later_format_is_refused_by_name():
    with pytest.raises(FormatTooNew, match="format 99"):
        Manifest.from_bytes(frame('{"format": 99}'))


def test_step_directories_sort_and_read_back():
    assert manifest_key(7) == "step-0000000007/manifest.ckpt"
    assert step_of("step-0000000007") == 7
    assert step_of("step-7") is None and step_of("tmp-0000000007") is None
