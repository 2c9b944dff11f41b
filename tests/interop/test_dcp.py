"""`dcp.save` and `dcp.load` on our format, and stock DCP checkpoints under our restore."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt.errors import CheckpointError, Corrupt, StateMismatch
from ckpt.interop import CkptReader, CkptWriter, ForeignFormat, restore_foreign
from ftcore.statedict import CannotStore
from tests.interop.conftest import dcp_state, restore, same_model, same_optimizer, save, trained


def test_dcp_load_reads_what_we_saved(tmp_path):
    state, other = trained(1), trained(2)
    save(state, tmp_path, step=7)
    target = dcp_state(other)
    dcp.load(target, storage_reader=CkptReader(tmp_path), no_dist=True)
    ours = dcp_state(state)
    for name, tensor in ours["model"].items():
        assert torch.equal(target["model"][name], tensor)
    for name, values in ours["optimizer"]["state"].items():
        assert torch.equal(target["optimizer"]["state"][name]["exp_avg"], values["exp_avg"])
    assert target["optimizer"]["param_groups"] == ours["optimizer"]["param_groups"]
    assert target["extra"]["epoch"] == 3 and target["extra"]["names"] == ["a", "b"]
    assert torch.equal(target["extra"]["half"], state["extra"]["half"])


def test_we_restore_what_dcp_saved_on_our_format(tmp_path):
    state, other = trained(1), trained(2)
    dcp.save(dcp_state(state), storage_writer=CkptWriter(tmp_path, step=7), no_dist=True)
    other["extra"] = {"epoch": 0, "names": [], "half": torch.zeros(6, dtype=torch.bfloat16)}
    assert restore(other, tmp_path) == 7
    assert same_model(state, other) and same_optimizer(state, other)
    assert other["extra"]["epoch"] == 3 and other["extra"]["names"] == ["a", "b"]
    assert torch.equal(other["extra"]["half"], state["extra"]["half"])


def test_dcp_saves_and_loads_through_us(tmp_path):
    state = {"a": torch.arange(10.0), "b": {"c": torch.tensor(3), "d": [1, 2.5, None, "x"]}}
    dcp.save(state, storage_writer=CkptWriter(tmp_path, step=1), no_dist=True)
    target = {"a": torch.zeros(10), "b": {"c": torch.tensor(0), "d": []}}
    dcp.load(target, storage_reader=CkptReader(tmp_path), no_dist=True)
    assert torch.equal(target["a"], state["a"]) and target["b"]["c"] == 3
    assert target["b"]["d"] == [1, 2.5, None, "x"]


def test_the_address_of_a_step_directory_names_the_step(tmp_path):
    where = tmp_path / "step-0000000012"
    dcp.save({"a": torch.ones(3)}, checkpoint_id=where, storage_writer=writer(), no_dist=True)
    target = {"a": torch.zeros(3)}
    dcp.load(target, checkpoint_id=where, storage_reader=CkptReader("unused"), no_dist=True)
    assert torch.equal(target["a"], torch.ones(3))


def writer():
    return CkptWriter("unused")


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_every_kind_of_tensor_comes_back_by_dcp(tmp_path, dtype):
    value = torch.tensor([[0, 1, 2], [3, 0, 5]]).to(dtype)
    state = {"a": value, "scalar": value[0, 1], "none": value[:0], "t": value.t()}
    dcp.save(state, storage_writer=CkptWriter(tmp_path, step=1), no_dist=True)
    target = {k: torch.zeros_like(v) for k, v in state.items()}
    dcp.load(target, storage_reader=CkptReader(tmp_path), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(bits(target[name]), bits(tensor))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_flipped_bit_is_an_error_of_dcp_load_and_nothing_has_changed(tmp_path):
    dcp.save({"a": torch.ones(9999)}, storage_writer=CkptWriter(tmp_path, step=1), no_dist=True)
    file = next((tmp_path / "step-0000000001").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[20_000] ^= 4
    file.write_bytes(data)
    target = {"a": torch.zeros(9999)}
    with pytest.raises(dcp.api.CheckpointException) as failure:
        dcp.load(target, storage_reader=CkptReader(tmp_path), no_dist=True)
    assert isinstance(next(iter(failure.value.failures.values()))[0], Corrupt)
    assert not target["a"].any()


def test_dcp_save_never_replaces_a_committed_step(tmp_path):
    dcp.save({"a": torch.ones(3)}, storage_writer=CkptWriter(tmp_path, step=1), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="committed already"):
        dcp.save({"a": torch.zeros(3)}, storage_writer=CkptWriter(tmp_path, step=1), no_dist=True)


class Surprise:
    pass


def test_an_object_of_the_user_is_refused_with_its_name(tmp_path):
    state = {"a": torch.ones(3), "deep": {"thing": Surprise()}}
    with pytest.raises(dcp.api.CheckpointException) as failure:
        dcp.save(state, storage_writer=CkptWriter(tmp_path, step=1), no_dist=True)
    cause = next(iter(failure.value.failures.values()))[0]
    assert isinstance(cause, CannotStore) and "deep.thing" in str(cause)


# --- stock checkpoints


def test_restore_reads_a_stock_checkpoint(tmp_path):
    state, other = trained(1), trained(2)
    dcp.save(dcp_state(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    restored = restore_foreign(other, tmp_path / "stock")
    assert same_model(state, other) and same_optimizer(state, other)
    assert other["extra"]["names"] == ["a", "b"]
    assert restored.report.is_exact


def test_a_stock_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    state, other = trained(1), trained(2)
    del other["extra"]["half"]
    other["extra"]["more"] = torch.zeros(2)
    dcp.save(dcp_state(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    before = dcp_state(other)["model"]["0.weight"].clone()
    with pytest.raises(StateMismatch, match=r"1 missing \(extra.more\); 1 unexpected"):
        restore_foreign(other, tmp_path / "stock")
    assert torch.equal(other["model"][0].weight, before)


def test_only_the_chosen_part_of_a_stock_checkpoint_is_read(tmp_path):
    state, other = trained(1), trained(2)
    dcp.save(dcp_state(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    restore_foreign(other, tmp_path / "stock", only="model.")
    assert same_model(state, other) and not same_optimizer(state, other)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle ran code')",)


def test_a_pickle_with_code_is_refused_before_it_runs(tmp_path):
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Bomb()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"builtins.exec, which is never loaded"):
        restore_foreign({"a": torch.zeros(3)}, tmp_path)


def test_a_stored_value_with_code_is_refused_before_it_runs(tmp_path):
    dcp.save({"a": torch.ones(3), "v": Surprise()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="v is no plain value"):
        restore_foreign({"a": torch.zeros(3)}, tmp_path)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_metadata_is_an_error_or_harmless_never_code(tmp_path, seed):
    import random

    rng = random.Random(seed)
    dcp.save({"a": torch.ones(30)}, checkpoint_id=tmp_path, no_dist=True)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (tmp_path / ".metadata").write_bytes(data)
    try:
        restore_foreign({"a": torch.zeros(30)}, tmp_path)
    except CheckpointError:
        pass


def test_a_directory_of_something_else_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ForeignFormat, match=r"neither .metadata nor"):
        restore_foreign({"a": torch.zeros(3)}, tmp_path)
