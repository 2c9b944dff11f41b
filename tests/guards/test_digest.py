import pytest
import torch
from torch import nn

from ftcore.digest import _sums, state_digest


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(31, 17).to(dtype)


def digest(m):
    return state_digest(m.named_parameters())


def test_equal_state_has_an_equal_digest():
    assert digest(model()) == digest(model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_it(dtype):
    m = model(dtype)
    before = digest(m)
    raw = m.weight.data.view(torch.uint8).view(-1)
    for where in range(0, raw.numel(), 97):
        raw[where] ^= 1 << (where % 8)
        assert digest(m) != before
        raw[where] ^= 1 << (where % 8)
    assert digest(m) == before


def test_swapped_values_change_it():
    m = model()
    before = digest(m)
    with torch.no_grad():
        m.weight[0], m.weight[1] = m.weight[1].clone(), m.weight[0].clone()
    assert digest(m) != before


def test_names_and_shapes_count():
    x = torch.arange(6.0)
    assert len({state_digest([(n, x.view(s))]) for n in "ab" for s in ((6,), (2, 3))}) == 4


def test_odd_sizes_and_empty_tensors_work():
    assert state_digest([("a", torch.zeros(3, dtype=torch.uint8)), ("b", torch.zeros(0))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_sums_that_a_gpu_makes_see_every_flipped_bit_too(dtype):
    x = (100 * torch.rand(1001)).to(dtype)
    before = torch.stack(_sums(x))
    raw = x.view(torch.uint8)
    for where in range(0, raw.numel(), 13):
        raw[where] ^= 1 << (where % 8)
        assert not torch.equal(torch.stack(_sums(x)), before)
        raw[where] ^= 1 << (where % 8)
