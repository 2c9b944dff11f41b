import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from ftcore.statedict import CannotStore, LayoutDiffers, StatePair, bytes_of, encode, flatten
from tests.statedict.models import bits, copy_over, make, train


def names(state):
    return [t.name for t in flatten(state).tensors]


def test_tensors_are_live_and_named_by_their_path():
    model, optimizer = make()
    train(model, optimizer)
    flat = flatten({"model": model, "optim": optimizer})
    tensors = {t.name: t.tensor for t in flat.tensors}
    assert tensors["model.0.weight"].data_ptr() == model[0].weight.data_ptr()
    exp_avg = optimizer.state[model[0].weight]["exp_avg"]
    assert tensors["optim.state.0.weight.exp_avg"].data_ptr() == exp_avg.data_ptr()


def test_a_heal_gives_the_same_bits_and_keeps_every_tensor():
    source, target = make(0), make(1)
    train(*source, steps=3)
    train(*target, steps=1)
    before = [t.tensor.data_ptr() for t in flatten(list(target)).tensors]
    flat = copy_over(list(source), list(target))
    assert bits(list(target)) == bits(list(source))
    assert [t.tensor.data_ptr() for t in flat.tensors] == before


def test_a_healed_run_goes_on_exactly_like_its_source():
    source, target = make(0), make(1)
    train(*source, steps=3)
    copy_over(list(source), list(target))
    train(*source, steps=2, seed=9)
    train(*target, steps=2, seed=9)
    assert bits(list(target)) == bits(list(source))


def test_plain_values_are_put_into_the_live_containers():
    target = {"step": 0, "inner": {"old": 1, "list": [1, 2]}, "pair": (1, [2])}
    inner, numbers = target["inner"], target["inner"]["list"]
    copy_over({"step": 7, "inner": {"list": [3], "new": None}, "pair": (5, [6])}, target)
    assert target == {"step": 7, "inner": {"list": [3], "new": None}, "pair": (5, [6])}
    assert target["inner"] is inner and inner["list"] is numbers


def test_options_of_the_optimizer_and_its_scheduler_are_healed():
    def run(lr):
        model, optimizer = make()
        optimizer.param_groups[0]["lr"] = lr
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2, 2])
        return model, {"model": model, "optim": optimizer, "scheduler": scheduler}

    model, source = run(0.5)
    train(model, source["optim"])
    source["scheduler"].step()
    _, target = run(0.1)
    groups = target["optim"].param_groups
    copy_over(source, target)
    assert target["optim"].param_groups is groups
    assert groups[0]["lr"] == source["optim"].param_groups[0]["lr"] == 0.05
    assert target["scheduler"].state_dict() == source["scheduler"].state_dict()


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor():
    source, target = (make(lr_seed) for lr_seed in (0, 1))
    for (_, optimizer), lr in ((source, 0.25), (target, 0.5)):
        optimizer.param_groups[0]["lr"] = torch.tensor(lr)
    lr = target[1].param_groups[0]["lr"]
    copy_over(list(source), list(target))
    assert target[1].param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


def test_a_registered_pair_is_read_and_set():
    box = {"value": torch.arange(3)}
    seen = []
    pair = StatePair(get=lambda: {"t": box["value"], "n": 4}, set=seen.append)
    copy_over({"rng": StatePair(lambda: {"t": torch.ones(3).long(), "n": 5}, print)}, {"rng": pair})
    assert seen[0]["n"] == 5
    assert seen[0]["t"].tolist() == [1, 1, 1]


def test_tied_tensors_move_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    entries = flatten({"model": Tied()}).layout.entries
    assert [e.alias_of for e in entries] == [None, "model.embed.weight"]


class FusedQkv(nn.Module):
    """Keeps one fused weight and shows three to the outside, as copies."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 2))
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._fuse)

    @staticmethod
    def _split(module, state_dict, prefix, metadata):
        fused = state_dict.pop(prefix + "qkv")
        for name, part in zip("qkv", fused.chunk(3), strict=True):
            state_dict[prefix + name] = part.clone()

    @staticmethod
    def _fuse(module, state_dict, prefix, *args):
        state_dict[prefix + "qkv"] = torch.cat([state_dict.pop(prefix + n) for n in "qkv"])


def test_a_module_whose_hooks_hand_out_copies_is_loaded_through_them():
    source, target = FusedQkv(), FusedQkv()
    assert names({"m": source}) == ["m.q", "m.k", "m.v"]
    pointer = target.qkv.data_ptr()
    copy_over({"m": source}, {"m": target})
    assert torch.equal(source.qkv, target.qkv)
    assert target.qkv.data_ptr() == pointer


def test_extra_state_of_a_module_is_healed():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    source, target = Counting(2, 2), Counting(2, 2)
    source.calls, target.calls = 5, 0
    copy_over({"m": source}, {"m": target})
    assert target.calls == 5


EXOTIC = {
    "view": torch.arange(12.0)[2:8],
    "transposed": torch.randn(3, 4).t(),
    "strided": torch.arange(12)[::3],
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "0-d": torch.tensor(3.5),
    "zero-size": torch.empty(0, 5),
    "bf16": torch.randn(5).bfloat16(),
    "half": torch.randn(5).half(),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "expanded": torch.randn(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("kind", list(EXOTIC))
def test_every_kind_of_tensor_is_filled_in_place(kind):
    value = EXOTIC[kind]
    target = {"t": torch.zeros_like(value)}
    if kind in ("view", "strided", "expanded", "transposed"):
        target = {"t": torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()}
    tensor = target["t"]
    copy_over({"t": value}, target)
    assert target["t"] is tensor
    assert tensor.to(torch.complex64).equal(value.to(torch.complex64))


def test_plain_memory_is_seen_without_a_copy():
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    bytes_of(tensor)[:2] = b"\x80\x3f"
    assert tensor.tolist() == [1.0, 0.0, 0.0]


class Scaled(torch.Tensor):
    """A quantized tensor in the manner of torchao: int8 values and a scale."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(func)


def test_a_tensor_subclass_is_taken_apart_and_filled_inside():
    source = Scaled(torch.tensor([1, 2], dtype=torch.int8), torch.tensor(0.5))
    target = Scaled(torch.zeros(2, dtype=torch.int8), torch.tensor(0.0))
    assert names({"w": source}) == ["w.values", "w.scale"]
    copy_over({"w": source}, {"w": target})
    assert (target.values.tolist(), target.scale.item()) == ([1, 2], 0.5)


def test_names_stay_unique_when_keys_contain_dots():
    state = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        1: torch.zeros(2),
        "1": torch.ones(2),
    }
    assert names(state) == ["a.b", "a.b~2", "1", "1~2"]
    target = {
        k: {"b": torch.zeros(1)} if k == "a" else torch.zeros_like(v) for k, v in state.items()
    }
    copy_over(state, target)
    assert bits(target) == bits(state)


def test_a_compiled_or_wrapped_module_has_the_names_of_the_bare_one():
    model, _ = make()
    assert names({"m": torch.compile(model)}) == names({"m": model})


@pytest.mark.parametrize(
    "value",
    [
        torch.sparse_coo_tensor([[0]], [1.0], (3,)),
        torch.empty(2, device="meta"),
        object(),
        {"deep": [lambda: 1]},
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value):
    with pytest.raises(CannotStore, match=r"state\.x") as refusal:
        flatten({"state": OrderedDict(x=value)})
    assert refusal.value.remedy


def test_a_state_that_contains_itself_is_refused():
    loop = {}
    loop["loop"] = loop
    with pytest.raises(CannotStore, match="in itself"):
        flatten(loop)


def test_a_received_tree_that_does_not_fit_is_refused():
    _model, optimizer = make()
    flat = flatten({"optim": optimizer})
    for tree in ({"optim": 3}, {"optim": {"param_groups": [{}], "state": {}}}):
        with pytest.raises(LayoutDiffers):
            flat.load(encode(tree))


def test_generators_and_arrays_are_healed_by_pairs():
    def rng_state(generator):
        return StatePair(generator.get_state, lambda state: generator.set_state(state))

    a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    numpy_a, numpy_b = np.random.RandomState(1), np.random.RandomState(2)
    copy_over(
        {"torch": rng_state(a), "numpy": StatePair(numpy_a.get_state, numpy_a.set_state)},
        {"torch": rng_state(b), "numpy": StatePair(numpy_b.get_state, numpy_b.set_state)},
    )
    assert torch.equal(torch.rand(5, generator=a), torch.rand(5, generator=b))
    assert numpy_a.rand() == numpy_b.rand()


def test_flatten_makes_no_copy():
    big, threads = torch.zeros(1000), threading.active_count()
    assert flatten({"t": big}).tensors[0].tensor.data_ptr() == big.data_ptr()
    assert threading.active_count() == threads


def test_parameters_are_told_from_buffers():
    model, _ = make()
    kinds = {t.name: t.is_parameter for t in flatten({"m": model}).tensors}
    assert kinds["m.1.weight"] and not kinds["m.1.running_mean"]
