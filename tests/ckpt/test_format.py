"""The format on disk: golden files, and readers that are not ours."""

import struct
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.fetch import read_tensors
from ckpt.listing import read_manifest
from ckpt.manifest import Manifest
from ckpt.plan import ALIGN, LARGE_BYTES
from ckpt.stores import open_store
from ckpt.tools import verify
from tests.ckpt.make_golden import TENSORS, golden

GOLDEN = Path(__file__).parent / "golden" / "v1"


def test_the_golden_step_still_reads():
    store = open_store(str(GOLDEN))
    manifest = read_manifest(store, 7)
    found = read_tensors(store, manifest, list(manifest.tensors))
    for name, tensor in TENSORS.items():
        assert bytes(found[name]) == bytes(tensor.reshape(-1).view(torch.uint8).numpy()), name
    assert found["tied"] == found["model.weight"]
    assert manifest.metrics == {"loss": 0.5} and verify(store, 7, deep=True).is_good


def test_the_golden_step_is_still_written_byte_for_byte():
    directory = GOLDEN / "step-0000000007"
    written = golden()
    assert {p.name for p in directory.iterdir()} == set(written)
    for key, data in written.items():
        if key == "manifest.ckpt":  # zlib may compress otherwise: the content counts
            assert Manifest.from_bytes(data) == Manifest.from_bytes((directory / key).read_bytes())
        else:
            assert data == (directory / key).read_bytes(), key


def test_any_safetensors_reader_opens_the_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = {
        "big": torch.randn(300, 300),
        "odd": torch.randn(7, 5, dtype=torch.float64),
        "half": torch.randn(9).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(5),
        "f8": torch.randn(33).to(torch.float8_e4m3fn),
    }
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(state, step=1).wait_durable(30)
    (path,) = tmp_path.glob("step-*/*.safetensors")
    found = safetensors.load_file(path)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        same = torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found[name], tensor)))
        assert same, name


def test_data_and_large_tensors_start_at_4_kb(tmp_path):
    state = {f"w{i}": torch.randn(LARGE_BYTES // 4 + 3 * i) for i in range(4)}
    state |= {f"s{i}": torch.zeros(i + 1, dtype=torch.int16) for i in range(9)}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(state, step=1).wait_durable(30)
    (path,) = tmp_path.glob("step-*/*.safetensors")
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + length) % ALIGN == 0 and path.stat().st_size % ALIGN == 0
    manifest = read_manifest(open_store(str(tmp_path)), 1)
    for name, tensor in manifest.tensors.items():
        assert not name.startswith("w") or tensor.pieces[0].offset % ALIGN == 0
        assert tensor.pieces[0].offset % 2 == 0


def test_twenty_thousand_tensors_take_few_files_and_little_room(tmp_path):
    state = {f"layers.{i}.w": torch.zeros(1024) for i in range(20_000)}
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(state, step=1).wait_durable(60)
    files = [p for p in tmp_path.rglob("*") if p.is_file() and "step-" in str(p)]
    assert len(files) == 2
    assert sum(p.stat().st_size for p in files) < 1.03 * 20_000 * 4096
