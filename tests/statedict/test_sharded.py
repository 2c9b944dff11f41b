import sys

import pytest
import torch
from torch import nn

from ftcore.statedict import CannotStore, NotAtStepBoundary, flatten
from tests.statedict.models import bits, copy_over
from tests.statedict.ranks import on_ranks

WORLD = 4


def blocks(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))


def run(model, optimizer, steps, before_update=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 6)).pow(2).mean().backward()
        before_update()
        optimizer.step()


def fsdp(seed, shape, names, tensor_parallel=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), blocks(seed)
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "dp" in names:
        mesh = mesh["dp"]
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


MESHES = {
    "FSDP2": ((WORLD,), ("shard",), False),
    "HSDP": ((2, 2), ("replicate", "shard"), False),
    "FSDP2 with tensor parallel": ((2, 2), ("dp", "tp"), True),
}


def heal_and_go_on(kind):
    """On each rank: a fresh group takes the state of a trained one, shard to shard."""
    shape, names, tensor_parallel = MESHES[kind]
    source, target = fsdp(0, shape, names, tensor_parallel), fsdp(1, shape, names, tensor_parallel)
    run(*source, steps=3)
    copy_over(list(source), list(target))
    run(*source, steps=2)
    run(*target, steps=2)
    assert bits(list(target)) == bits(list(source))


def heal_over_sockets(kind):
    """Rank i of a joiner heals from rank i of the source, shard to shard, while that trains on."""
    from ftcore.heal import HealServer, heal

    shape, names, tensor_parallel = MESHES[kind]
    source, target = fsdp(0, shape, names, tensor_parallel), fsdp(1, shape, names, tensor_parallel)
    run(*source, steps=3)
    with HealServer() as server:
        offer = server.publish(list(source), step=3, quorum_id=1)
        before = bits(list(source))
        run(*source, steps=1, before_update=server.gate)
        assert server._snapshot.is_intact()
        heal([offer], into=list(target))
    assert bits(list(target)) == before != bits(list(source))
    assert all(t.is_parameter for t in flatten(source[0]).tensors)


def boxes_cover_every_element_once(kind):
    import torch.distributed as dist

    shape, names, tensor_parallel = MESHES[kind]
    model, _ = fsdp(0, shape, names, tensor_parallel)
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    mine = {t.name: (t.entry.box, t.tensor.clone()) for t in flatten(model).tensors}
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, mine)
    for name, full in whole.items():
        rebuilt, seen = torch.zeros_like(full), torch.zeros_like(full)
        for box, local in (rank[name] for rank in everyone):
            part = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            rebuilt[part], seen[part] = local, 1
        assert torch.equal(rebuilt, full) and seen.all(), name


def export_in_mid_forward_is_refused(_):
    """The export that would reshard parameters in use is refused, and the step survives."""
    model, optimizer = fsdp(0, (WORLD,), ("shard",))
    refused = []

    def trap(*_):
        try:
            flatten({"model": model})
        except NotAtStepBoundary as error:
            refused.append(str(error))

    model[1].register_forward_hook(trap)
    run(model, optimizer, steps=1)
    assert refused == ["the state was exported while the model was in FORWARD"]


def partial_sums_are_refused(_):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (WORLD,))
    with pytest.raises(CannotStore, match=r"state\.sum"):
        flatten({"state": {"sum": DTensor.from_local(torch.ones(2), mesh, [Partial()])}})


STORIES = [
    (heal_and_go_on, list(MESHES)),
    (heal_over_sockets, list(MESHES)),
    (boxes_cover_every_element_once, list(MESHES)),
    (export_in_mid_forward_is_refused, [None]),
    (partial_sums_are_refused, [None]),
]


def test_sharded_states_on_four_processes(tmp_path):
    """One start of four processes tells all stories; the first that fails names itself."""
    on_ranks(__name__, WORLD, tmp_path)


if __name__ == "__main__":
    import torch.distributed as dist

    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=WORLD)
    for story, cases in STORIES:
        for case in cases:
            print(f"rank {rank}: {story.__name__}({case})", flush=True)
            story(case)
    dist.destroy_process_group()
