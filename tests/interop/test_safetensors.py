"""Hugging Face files under our restore, and exports in all three formats."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from ckpt.errors import CheckpointError, Corrupt, StateMismatch
from ckpt.interop import export, restore_foreign
from ckpt.stores import open_store
from ftcore.base.errors import BadSetting
from tests.interop.conftest import dcp_state, same_model, same_optimizer, save, trained


def hugging_face(state, directory):
    """Two shards and an index, as transformers saves them."""
    directory.mkdir()
    weights = state["model"].state_dict()
    names = list(weights)
    shards = {"model-00001-of-00002.safetensors": names[:2]}
    shards["model-00002-of-00002.safetensors"] = names[2:]
    for file, part in shards.items():
        save_file({n: weights[n] for n in part}, directory / file)
    index = {"weight_map": {n: f for f, part in shards.items() for n in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_restore_reads_shards_with_an_index(tmp_path):
    state, other = trained(1), trained(2)
    where = hugging_face(state, tmp_path / "hf")
    restore_foreign({"model": other["model"]}, where, rename=lambda n: f"model.{n}")
    assert same_model(state, other)


def test_restore_reads_a_single_file(tmp_path):
    state, other = trained(1), trained(2)
    save_file(state["model"].state_dict(), tmp_path / "m.safetensors")
    restored = restore_foreign(
        {"model": other["model"]}, tmp_path / "m.safetensors", rename=lambda n: f"model.{n}"
    )
    assert same_model(state, other) and restored.report.is_exact


def test_a_missing_shard_is_noticed_by_the_index(tmp_path):
    where = hugging_face(trained(1), tmp_path / "hf")
    save_file({"other": torch.zeros(1)}, where / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="tensors of the index are not in their files"):
        restore_foreign({"model": trained(2)["model"]}, where, rename=lambda n: f"model.{n}")


def test_names_that_do_not_fit_change_nothing(tmp_path):
    state, other = trained(1), trained(2)
    before = other["model"][0].weight.detach().clone()
    with pytest.raises(StateMismatch, match="missing"):
        restore_foreign({"model": other["model"]}, hugging_face(state, tmp_path / "hf"))
    assert torch.equal(other["model"][0].weight, before)


@pytest.mark.parametrize("cut", [4, 100, 1000])
def test_a_cut_off_file_is_noticed(tmp_path, cut):
    save_file(trained(1)["model"].state_dict(), tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(data[: len(data) - cut])
    with pytest.raises(CheckpointError, match="instead of"):
        restore_foreign({"model": trained(2)["model"]}, tmp_path, rename=lambda n: f"model.{n}")


# --- exports


def test_an_exported_dcp_checkpoint_is_loaded_by_stock_dcp(tmp_path):
    state, other = trained(1), trained(2)
    save(state, tmp_path / "run", step=5)
    assert export(open_store(str(tmp_path / "run")), tmp_path / "out", form="dcp") == 5
    target = dcp_state(other)
    dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(target["model"][name], tensor)
    assert target["extra"]["names"] == ["a", "b"]


def test_an_exported_torch_file_loads_with_weights_only(tmp_path):
    state = trained(1)
    save(state, tmp_path / "run", step=5)
    export(open_store(str(tmp_path / "run")), tmp_path / "out", form="torch")
    loaded = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
    state["model"].load_state_dict(loaded["model"])
    assert loaded["extra"]["epoch"] == 3
    assert torch.equal(loaded["extra"]["half"], state["extra"]["half"])


def test_exported_safetensors_are_read_by_the_stock_library(tmp_path):
    state = trained(1)
    save(state, tmp_path / "run", step=5)
    export(
        open_store(str(tmp_path / "run")),
        tmp_path / "out",
        form="safetensors",
        only="model.",
        shard_bytes_max=600,
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(load_file(tmp_path / "out" / index["weight_map"][name])[name], tensor)


def test_what_is_exported_comes_back_by_restore(tmp_path):
    state = trained(1)
    save(state, tmp_path / "run", step=5)
    store = open_store(str(tmp_path / "run"))
    for form in ("dcp", "safetensors"):
        other = trained(2)
        export(store, tmp_path / form, form=form)
        restore_foreign(other, tmp_path / form)
        assert same_model(state, other) and same_optimizer(state, other)


def test_an_export_of_damaged_bytes_fails_and_leaves_no_target(tmp_path):
    save(trained(1), tmp_path / "run", step=5)
    file = next((tmp_path / "run" / "step-0000000005").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(Corrupt):
        export(open_store(str(tmp_path / "run")), tmp_path / "out", form="torch")
    assert not (tmp_path / "out").exists()


def test_an_export_never_writes_over_anything(tmp_path):
    with pytest.raises(BadSetting, match="exists"):
        export(open_store(str(tmp_path)), tmp_path, form="dcp")
