"""What a heal never does: export off the training thread, make new tensors, recompile, unpickle."""

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ftcore.heal import HealServer, heal
from ftcore.statedict import flatten
from tests.heal.states import bits, state, train_step
from tests.statedict.test_flat import FusedQkv

ROOT = Path(__file__).parents[2]
HEARD_FROM_OUTSIDE = ("ftcore/heal", "ftcore/statedict", "ftcore/wire")
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "torch.load"}


class Watched(nn.Linear):
    """Notes which threads look at its state; FSDP2's hooks would reshard it under a forward."""

    def __init__(self):
        super().__init__(512, 512)
        self.exported_on = set()
        self.register_state_dict_post_hook(lambda *_: self.exported_on.add(threading.get_ident()))


@pytest.mark.parametrize("stage_ahead", [False, True])
def test_a_module_is_exported_on_the_training_thread_only(stage_ahead):
    source, joiner = Watched(), Watched()
    with HealServer(stage_ahead=stage_ahead) as server:
        offer = server.publish({"m": source}, step=1, quorum_id=1)
        healer = threading.Thread(target=lambda: heal([offer], into={"m": joiner}))
        healer.start()
        server.gate()
        healer.join()
    assert source.exported_on == {threading.get_ident()}
    assert torch.equal(source.weight, joiner.weight)


def test_parameters_buffers_and_optimizer_tensors_are_the_same_objects_after_a_heal():
    source, joiner = state(0, steps=1), state(1, steps=1)
    optimizer = joiner["optim"]

    def objects():
        moments = [t for s in optimizer.state.values() for t in s.values()]
        return [*joiner["model"].parameters(), *joiner["model"].buffers(), *moments]

    before = [(id(t), t.data_ptr()) for t in objects()]
    with HealServer() as server:
        heal([server.publish(source, step=1, quorum_id=1)], into=joiner)
    assert [(id(t), t.data_ptr()) for t in objects()] == before
    assert bits(joiner) == bits(source)


def test_fused_weights_that_hooks_show_as_copies_are_healed_through_the_module():
    source, joiner = FusedQkv(), FusedQkv()
    pointer = joiner.qkv.data_ptr()
    with HealServer() as server:
        heal([server.publish({"m": source}, step=1, quorum_id=1)], into={"m": joiner})
    assert torch.equal(source.qkv, joiner.qkv)
    assert joiner.qkv.data_ptr() == pointer


def test_a_compiled_model_and_optimizer_make_no_new_graph_after_a_heal():
    from torch._dynamo.utils import counters

    def run(tree):
        tree["optim"].zero_grad()
        tree["fast"](torch.ones(2, 512)).pow(2).mean().backward()
        tree["step"]()

    def compiled(seed):
        tree = state(seed)
        tree["optim"].param_groups[0]["lr"] = torch.tensor(1e-3)
        tree["fast"] = torch.compile(tree["model"], backend="eager")
        tree["step"] = torch.compile(tree["optim"].step, backend="eager")
        return tree

    source, joiner = compiled(0), compiled(1)
    for _ in range(3):
        run(source)
        run(joiner)
    graphs = counters["stats"]["unique_graphs"]
    live = [{"model": t["model"], "optim": t["optim"]} for t in (source, joiner)]
    with HealServer() as server:
        heal([server.publish(live[0], step=3, quorum_id=1)], into=live[1])
    assert bits(live[0]) == bits(live[1])
    run(joiner)
    run(joiner)
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_a_healed_joiner_trains_on_with_the_bits_of_its_source():
    source, joiner = state(0, steps=2), state(1)
    with HealServer() as server:
        heal([server.publish(source, step=2, quorum_id=1)], into=joiner)
    for seed in (7, 8):
        train_step(source["model"], source["optim"], seed)
        train_step(joiner["model"], joiner["optim"], seed)
    assert flatten(joiner).layout == flatten(source).layout
    assert bits(joiner) == bits(source)


@pytest.mark.parametrize("package", HEARD_FROM_OUTSIDE)
def test_nothing_that_is_received_can_be_unpickled(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    used = {alias.name for alias in names}
                case ast.ImportFrom(module=module):
                    used = {module}
                case ast.Attribute(value=ast.Name(id=owner), attr=name):
                    used = {f"{owner}.{name}"}
                case _:
                    used = set()
            assert not used & UNPICKLES, f"{path.name} uses {used}"
