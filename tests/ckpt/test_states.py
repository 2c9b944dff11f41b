"""Everything that states hold comes back bit by bit."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch

from ckpt import Checkpointer
from ftcore.base.errors import FtError


def roundtrip(tmp_path, saved, fresh):
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save(saved, step=1).wait_durable(30)
        checkpoints._memory = lambda: None
        assert checkpoints.restore(fresh) == 1
    return fresh


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
]


def test_every_element_type(tmp_path):
    saved = {str(d): torch.randint(0, 2, (3, 5)).to(d) for d in DTYPES}
    found = roundtrip(tmp_path, saved, {k: torch.zeros_like(v) for k, v in saved.items()})
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(bits(found[name]), bits(tensor)), name


SHAPES_AND_VIEWS = {
    "scalar": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 3),
    "empty in the middle": lambda: torch.empty(2, 0, 3),
    "transposed": lambda: torch.randn(5, 7).t(),
    "strided": lambda: torch.randn(20)[::3],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 4).expand(6, 4),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "large and transposed": lambda: torch.randn(300, 400).t(),
    "a part of a large one": lambda: torch.randn(1000, 100)[10:20],
}


@pytest.mark.parametrize("name", list(SHAPES_AND_VIEWS))
def test_views_and_odd_shapes(tmp_path, name):
    torch.manual_seed(1)
    tensor = SHAPES_AND_VIEWS[name]()
    fresh = {"t": SHAPES_AND_VIEWS[name]()}
    before = fresh["t"]
    roundtrip(tmp_path, {"t": tensor}, fresh)
    assert fresh["t"] is before and fresh["t"].stride() == tensor.stride()
    assert torch.equal(fresh["t"], tensor)


def test_plain_values_of_every_kind(tmp_path):
    saved = {
        "numbers": [1, 2**80, -1.5, float("inf"), 1 + 2j, True, None],
        "keys": {1: "int", (1, "a"): "tuple", None: "none", 2.5: "float"},
        "sets": {1, 2, 3},
        "ordered": OrderedDict(b=1, a=2),
        "numpy": np.arange(6).reshape(2, 3),
        "bytes": b"\x00\xff",
        "text": "naïve \N{SNOWMAN}",
        "dtype": torch.bfloat16,
    }
    found = roundtrip(tmp_path, saved, dict.fromkeys(saved))
    assert (found["numpy"] == saved["numpy"]).all()
    del found["numpy"], saved["numpy"]
    assert found == saved and list(found["ordered"]) == ["b", "a"]


class Generators:
    """All random generators of this process, as one object of the state."""

    def state_dict(self):
        return {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }

    def load_state_dict(self, state):
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


def test_random_generators_go_on_where_they_were(tmp_path):
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)

    def draw():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    with Checkpointer(tmp_path, inline=True) as checkpoints:
        checkpoints.save({"rng": Generators()}, step=1).wait_durable(30)
        expected = draw()
        checkpoints.restore({"rng": Generators()})
        assert draw() == expected


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_schedulers_and_optimizers_continue_exactly(tmp_path, kind):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    def steps(state, count):
        for i in range(count):
            state["model"](torch.full((2, 4), float(i))).sum().backward()
            state["optimizer"].step()
            state["schedule"].step()
            state["optimizer"].zero_grad()
        return [p.detach().clone() for p in state["model"].parameters()]

    state = make()
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        steps(state, 3)
        checkpoints.save(state, step=3).wait_durable(30)
        expected = steps(state, 4)
        fresh = make()
        checkpoints.restore(fresh)
        found = steps(fresh, 4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_compiled_or_wrapped_model_has_the_names_of_the_plain_one(tmp_path):
    model = torch.nn.Linear(3, 3)
    wrapped = torch.compile(torch.nn.Linear(3, 3), backend="eager")
    roundtrip(tmp_path, {"model": model}, {"model": wrapped})
    assert torch.equal(wrapped.weight, model.weight)


class Scaled(torch.Tensor):
    """A quantized subclass: packed integers and a scale, as torchao has them."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_, args[0].scale)
        raise NotImplementedError(func)


def test_a_quantized_subclass_is_stored_by_its_parts(tmp_path):
    def make(value):
        return Scaled(torch.full((4,), value, dtype=torch.int8), torch.tensor(value / 2))

    found = {"q": make(0)}
    roundtrip(tmp_path, {"q": make(6)}, found)
    assert found["q"].data_.tolist() == [6] * 4 and found["q"].scale.item() == 3.0


def test_a_sparse_tensor_is_refused_with_its_path(tmp_path):
    sparse = torch.eye(3).to_sparse()
    with (
        Checkpointer(tmp_path, inline=True) as checkpoints,
        pytest.raises(FtError, match=r"deep\.sparse") as failure,
    ):
        checkpoints.save({"deep": {"sparse": sparse}}, step=1)
    assert "indices" in failure.value.remedy


def test_a_pickled_object_in_a_value_is_never_run(tmp_path):
    with Checkpointer(tmp_path, inline=True) as checkpoints:
        payload = b"cos\nsystem\n(S'touch /tmp/ckpt-was-here'\ntR."
        checkpoints.save({"blob": payload}, step=1).wait_durable(30)
        found = {"blob": b""}
        checkpoints.restore(found)
    assert found["blob"] == payload
