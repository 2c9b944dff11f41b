import os
from pathlib import Path

import pytest
import torch

from ftcore.statedict import flatten, prepare
from tests.statedict.models import bits, copy_over, make, train

RULES = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW amsgrad, fused": (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    "AdamW for loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW capturable": (torch.optim.AdamW, {"weight_decay": 0.5}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
}


@pytest.mark.parametrize("rule", list(RULES))
def test_a_fresh_joiner_goes_on_like_the_trained_source(rule):
    cls, options = RULES[rule]
    source, target = make(0, cls, **options), make(1, cls, **options)
    train(*source, steps=3)
    copy_over(list(source), list(target))
    train(*source, steps=2, seed=5)
    train(*target, steps=2, seed=5)
    assert bits(list(target)) == bits(list(source))


def trained(seed=0):
    source = make(seed)
    train(*source, steps=2)
    return source, flatten(list(source))


def test_preparing_changes_no_parameter_gradient_hook_or_random_number():
    _, sent = trained()
    model, optimizer = make(1)
    model[0].weight.data[0, 0] = -0.0
    model[0].weight.data[0, 1] = float("nan")
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    before, rng = bits({"m": model}), torch.get_rng_state()
    flat = prepare([model, optimizer], sent.layout, sent.plain)
    assert flat.layout == sent.layout
    assert bits({"m": model}) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert model[0].weight.grad.eq(1).all() and model[0].bias.grad is None


def test_only_the_parameters_that_the_source_has_stepped_get_state():
    source, target = make(0), make(1)
    source[0][2].requires_grad_(False)
    train(*source)
    target[0][2].requires_grad_(False)
    copy_over(list(source), list(target))
    assert len(target[1].state) == len(source[1].state) == 4


class Noted(torch.optim.AdamW):
    """Notes which parameters were stepped."""

    stepped = ()

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.stepped += tuple(p.numel() for p in parameters if p.grad is not None)
        return super().step(closure)


def layers(seed, rule, sizes):
    torch.manual_seed(seed)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(*size)) for size in sizes)
    return model, rule(model.parameters(), lr=1e-2)


def step_all(model, optimizer):
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_one_small_parameter_of_each_kind_is_stepped_and_the_others_get_state_like_it():
    sizes = [(600, 700), (20, 30), (50, 60), (8,), (9,)]
    source, target = layers(0, torch.optim.AdamW, sizes), layers(1, Noted, sizes)
    step_all(*source)
    copy_over(list(source), list(target))
    assert sorted(target[1].stepped) == [8, 600]
    assert bits(list(target)) == bits(list(source))


def test_state_that_depends_on_the_shape_is_made_by_the_optimizer():
    """Adafactor keeps rows and columns of a matrix: no sibling's state fits by its shape."""
    sizes = [(6, 7), (2, 3), (5, 5)]
    source, target = (layers(seed, torch.optim.Adafactor, sizes) for seed in (0, 1))
    step_all(*source)
    copy_over(list(source), list(target))
    assert bits(list(target)) == bits(list(source))


def test_state_like_a_siblings_takes_no_memory_before_it_is_filled():
    sizes = [(2, 2), (64, 1 << 20)]
    source, target = layers(0, torch.optim.Adam, sizes), layers(1, torch.optim.Adam, sizes)
    step_all(*source)
    sent = flatten(list(source))
    before = resident_bytes()
    prepare(list(target), sent.layout, sent.plain)
    assert resident_bytes() - before < 64 << 20  # the two moments are 512 MiB
    assert target[1].state[target[0][1]]["exp_avg"].data_ptr() % 4096 == 0


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_state_that_the_source_has_not_is_dropped():
    source, target = make(0), make(1)
    train(*target)
    copy_over(list(source), list(target))
    assert not target[1].state
    assert bits(list(target)) == bits(list(source))


def test_a_rule_that_needs_a_closure_gets_its_state_from_the_layout():
    def lbfgs_run(seed):
        torch.manual_seed(seed)
        parameter = torch.nn.Parameter(torch.randn(5))
        return parameter, torch.optim.LBFGS([parameter], lr=0.1, max_iter=3)

    def steps(parameter, optimizer, count):
        def closure():
            optimizer.zero_grad()
            loss = (parameter**2 + parameter.sin()).sum()
            loss.backward()
            return loss

        for _ in range(count):
            optimizer.step(closure)

    source, target = lbfgs_run(0), lbfgs_run(1)
    steps(*source, 3)
    copy_over(list(source), list(target))
    steps(*source, 2)
    steps(*target, 2)
    assert torch.equal(source[0], target[0])


def test_a_heal_never_recompiles():
    from torch._dynamo.utils import counters

    def compiled(seed):
        model, optimizer = make(seed)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        fast = torch.compile(model, backend="eager")
        step = torch.compile(optimizer.step, backend="eager")

        def run():
            optimizer.zero_grad()
            fast(torch.ones(6, 4)).pow(2).mean().backward()
            step()

        return [model, optimizer], run

    source, run_source = compiled(0)
    target, run_target = compiled(1)
    for _ in range(3):
        run_source()
        run_target()
    graphs = counters["stats"]["unique_graphs"]
    copy_over(source, target)
    run_target()
    run_target()
    assert counters["stats"]["unique_graphs"] == graphs
