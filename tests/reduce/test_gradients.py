import torch
from torch import nn

from ftcore.reduce.buckets import Buckets
from ftcore.reduce.gradients import plain_parts
from tests.reduce.members import fake_groups


class Scaled(torch.Tensor):
    """A weight stored as small integers and a scale, as torchao's quantized ones are."""

    @staticmethod
    def __new__(cls, small, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, small.shape, dtype=scale.dtype, requires_grad=False
        )

    def __init__(self, small, scale):
        self.small, self.scale = small, scale

    def __tensor_flatten__(self):
        return ["small", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(x):
            return x.small.to(x.scale.dtype) * x.scale if isinstance(x, cls) else x

        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].small, args[0].scale)
        return func(*torch.utils._pytree.tree_map(plain, args), **(kwargs or {}))


def weight():
    return Scaled(torch.ones(4, 3, dtype=torch.int8), torch.tensor(0.5))


def test_a_wrapper_is_taken_apart_to_its_plain_tensors():
    assert [p.dtype for p in plain_parts(weight())] == [torch.int8, torch.float32]
    assert plain_parts(x := torch.ones(2)) == [x]


def test_a_quantized_weight_with_a_plain_gradient_is_reduced():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(weight())

        def forward(self, x):
            return x @ self.weight.t()

    m = Layer()
    m(torch.ones(2, 3)).sum().backward()
    before = m.weight.grad.clone()
    Buckets(m).reduce_fast(fake_groups(1)[0], weight=0.5)
    assert torch.equal(m.weight.grad, before / 2)
