"""What must give the gradients of one process: every kind of parallelism inside a replica group."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ftcore.heal import HealServer, heal
from ftcore.local_sgd.outer_reduce import start_average
from ftcore.local_sgd.replica import OuterOptimizer, make_fragments
from ftcore.process_group.errors import GroupAborted
from ftcore.process_group.registry import replicate_mesh
from ftcore.reduce.buckets import Buckets
from ftcore.reduce.fsdp_hook import reduce_in_fsdp
from tests.reduce.parallel.cluster import (
    RANKS,
    X,
    assert_close,
    expected_gradients,
    full_gradients,
    loss_of,
    model,
)

SMALL = 1000  # bytes a bucket, so that there are several


def inner_mesh(*shape, names=("inner",)):
    return init_device_mesh("cpu", shape or (RANKS,), mesh_dim_names=names)


def sharded(m=None, **options):
    m = m or model()
    for layer in m:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=inner_mesh(), **options)
    return fully_shard(m, mesh=inner_mesh(), **options)


def tensor_parallel(m, mesh):
    return parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def reduced(member, case, m, x, *, armed=False, within=1e-5, expected=None):
    """Backward on this member's samples, reduce, compare with the whole batch in one process."""
    group, buckets = member.group(case), Buckets(m, bucket_bytes_max=SMALL)
    for _ in range(2):
        m.zero_grad()
        if armed:
            buckets.arm(group, weight=0.5)
        loss_of(m(x)).backward()
        buckets.reduce_fast(group, weight=0.5)
        assert_close(full_gradients(m), expected or expected_gradients(), within=within)


def fsdp2(member):
    reduced(member, "fsdp2", sharded(), member.quarter)


def fsdp2_overlapped(member):
    reduced(member, "fsdp2-armed", sharded(), member.quarter, armed=True)


def fsdp2_accumulation(member):
    m, group = sharded(), member.group("fsdp2-accumulation")
    buckets = Buckets(m, bucket_bytes_max=SMALL)
    for i, part in enumerate(member.quarter.chunk(2)):
        if i == 1:
            buckets.arm(group, weight=0.5)
        (loss_of(m(part)) / 2).backward()
    buckets.reduce_fast(group, weight=0.5)
    assert_close(full_gradients(m), expected_gradients())


def fsdp2_exact_keeps_its_bits_when_a_group_dies(member):
    """Two shards dealt to two groups, then both to the survivor: the same gradient, bit for bit."""
    m, group = sharded(), member.group("fsdp2-exact")
    buckets = Buckets(m, bucket_bytes_max=SMALL)

    def run(shard):
        with buckets.shard(shard):
            loss_of(m(X.chunk(2)[shard].chunk(RANKS)[member.rank])).backward()

    run(member.replica)
    buckets.reduce_exact(group, owner_of=(0, 1), scale=0.5)
    before = full_gradients(m)
    assert_close(before, expected_gradients())
    group.abort("replica group 1 died")
    if member.replica == 0:
        member.configure(group, "fsdp2-exact", world_size=1, quorum=2)
        run(1)
        buckets.reduce_exact(group, owner_of=(0, 0), scale=0.5)
        for old, new in zip(before, full_gradients(m), strict=True):
            assert torch.equal(old, new)


def fsdp2_all_reduce_hook(member):
    m, group = sharded(), member.group("fsdp2-hook")
    hooks = reduce_in_fsdp(m, group, weight=0.5)
    loss_of(m(member.quarter)).backward()
    hooks.finish()
    assert_close(full_gradients(m), expected_gradients())
    group.abort("member lost")
    m.zero_grad()
    loss_of(m(member.quarter)).backward()  # reaches the end of backward although the group is gone
    try:
        hooks.finish()
        raise AssertionError("a broken group was not noticed")
    except GroupAborted:
        pass


def hsdp_mesh(member):
    """FSDP2's own all-reduce over our group, through a 2-D mesh; then the group changes size."""
    group = member.group("hsdp")
    m = model()
    fully_shard(m, mesh=replicate_mesh(group, inner_mesh()))
    loss_of(m(member.quarter)).backward()
    group.settle()
    assert_close(full_gradients(m), expected_gradients())
    if member.replica == 0:
        m.zero_grad()
        member.configure(group, "hsdp", world_size=1, quorum=2)
        loss_of(m(member.quarter)).backward()
        assert_close(full_gradients(m), expected_gradients(member.half))


def tp(member):
    reduced(member, "tp", tensor_parallel(model(), inner_mesh()), member.half, armed=True)


class Normed(nn.Module):
    """A norm whose weight gets a partial gradient on each rank of a sequence parallel mesh."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


def tp_with_sequence_parallel_norm(member):
    twin, x = Normed(), X.view(4, 2, 16)
    loss_of(twin(x)).backward()
    expected = [p.grad for p in twin.parameters()]
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    m = parallelize_module(Normed(), inner_mesh(), plan)
    reduced(member, "tp-sp", m, x.chunk(2)[member.replica], expected=expected)


def fsdp_with_tp(member):
    for shape in ((1, RANKS), (RANKS, 1)):
        mesh = inner_mesh(*shape, names=("dp", "tp"))
        m = fully_shard(tensor_parallel(model(), mesh["tp"]), mesh=mesh["dp"])
        x = member.half.chunk(shape[0])[mesh["dp"].get_local_rank()]
        reduced(member, f"fsdp-tp-{shape[0]}", m, x)


def pipeline_1f1b(member):
    whole = model()
    part = whole[:2] if member.rank == 0 else whole[2:]
    stage = PipelineStage(part, member.rank, RANKS, torch.device("cpu"))
    group, buckets = member.group("pp"), Buckets(part, bucket_bytes_max=SMALL)
    expected = expected_gradients()
    expected = expected[:2] if member.rank == 0 else expected[2:]
    weight = 0.5 / 2  # of each group's two microbatches
    for armed in (False, True):
        schedule = Schedule1F1B(
            stage, n_microbatches=2, loss_fn=lambda out, _: loss_of(out), scale_grads=False
        )
        part.zero_grad()
        if armed:
            buckets.arm(group, weight=weight, backwards=2)
        schedule.step(member.half) if member.rank == 0 else schedule.step(target=member.half)
        buckets.reduce_fast(group, weight=weight)
        assert_close([p.grad for p in part.parameters()], expected)


def hsdp_inside_a_group(member):
    for shape in ((RANKS, 1), (1, RANKS)):
        mesh = inner_mesh(*shape, names=("replicate", "shard"))
        m = model()
        for layer in (m[0], m[2], m):
            fully_shard(layer, mesh=mesh)
        reduced(member, f"hsdp-inside-{shape[0]}", m, member.quarter, armed=True)


def how_often_gradients_come_is_learned(member):
    """Accumulation in one step, two microbatches of 1F1B in the next: nobody says how many."""
    m, group = sharded(), member.group("learned")
    buckets = Buckets(m, bucket_bytes_max=SMALL)
    for _ in range(3):
        m.zero_grad()
        buckets.arm(group, weight=0.5, backwards=None)
        for part in member.quarter.chunk(2):
            (loss_of(m(part)) / 2).backward()
        buckets.reduce_fast(group, weight=0.5)
        assert_close(full_gradients(m), expected_gradients())


def pipeline_learned(member):
    whole = model()
    part = whole[:2] if member.rank == 0 else whole[2:]
    stage = PipelineStage(part, member.rank, RANKS, torch.device("cpu"))
    group, buckets = member.group("pp-learned"), Buckets(part, bucket_bytes_max=SMALL)
    expected = expected_gradients()
    expected = expected[:2] if member.rank == 0 else expected[2:]
    for _ in range(3):
        schedule = Schedule1F1B(
            stage, n_microbatches=2, loss_fn=lambda out, _: loss_of(out), scale_grads=False
        )
        part.zero_grad()
        buckets.arm(group, weight=0.25, backwards=None)
        schedule.step(member.half) if member.rank == 0 else schedule.step(target=member.half)
        buckets.reduce_fast(group, weight=0.25)
        assert_close([p.grad for p in part.parameters()], expected)


def mixed_precision(member):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reduced(member, "mixed", sharded(mp_policy=policy), member.quarter, armed=True, within=2e-2)


def activation_checkpointing(member):
    m = model()
    m[0] = checkpoint_wrapper(m[0])
    fully_shard(m, mesh=inner_mesh())
    reduced(member, "checkpointing", m, member.quarter, armed=True)


def cpu_offload(member):
    policy = CPUOffloadPolicy(pin_memory=False)
    reduced(member, "offload", sharded(offload_policy=policy), member.quarter)


class Block(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compiled_blocks():
    """A model whose blocks are compiled and sharded, and a way to count its graphs."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    up, act, down = model()
    m = nn.Sequential(Block(up, act), Block(down))
    for block in m:
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=inner_mesh())
    fully_shard(m, mesh=inner_mesh())
    return m, lambda: counters["stats"]["unique_graphs"]


def compiled(member):
    m, graphs = compiled_blocks()
    reduced(member, "compiled", m, member.quarter, armed=True)
    before = graphs()
    assert before > 0
    reduced(member, "compiled-again", m, member.quarter, armed=True)
    assert graphs() == before


def compiled_and_healed_shard_to_shard(member):
    """Each rank of group 1 copies its shards from the rank with its number in group 0."""
    m, graphs = compiled_blocks()
    optimizer = torch.optim.AdamW(m.parameters())
    state = {"model": m, "optimizer": optimizer}
    reduced(member, "before-heal", m, member.quarter)
    before = graphs()
    if member.replica == 1:
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(1.5)
        heal([member.hear("offer")], into=state)
        member.say("done", "")
    else:
        with HealServer() as server:
            member.say("offer", server.publish(state, step=1, quorum_id=1))
            member.hear("done")
    reduced(member, "after-heal", m, member.quarter)
    assert graphs() == before > 0


def local_sgd_over_fsdp2(member):
    """Outer steps on the shards of each rank: the mean of what both groups reached."""
    m, group = sharded(), member.group("local-sgd")
    fragments = make_fragments(dict(m.named_parameters()), 2)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(float(member.replica))
    for fragment in fragments:
        average = torch.empty_like(fragment.outer)
        running = start_average(group, fragment.change(), givers=[0, 1], out=average)
        running.gather()
        running.wait()
        OuterOptimizer(rate=1.0, momentum=0.0).step(fragment.outer, fragment.velocity, average)
        fragment.adopt(keep=0.0)
    for p, start in zip(m.parameters(), model().parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), start + 0.5)


def functional_collectives_by_name(member):
    from ftcore.process_group.registry import register, unregister

    group = member.group("functional")
    name = register(group)
    ops = torch.ops._c10d_functional
    out = ops.wait_tensor(ops.all_reduce(torch.tensor([member.replica + 1.0]), "sum", name))
    assert out.item() == 3.0
    assert dist.get_backend(group) == "gloo"
    unregister(group)


CASES = [
    fsdp2,
    fsdp2_overlapped,
    fsdp2_accumulation,
    fsdp2_exact_keeps_its_bits_when_a_group_dies,
    fsdp2_all_reduce_hook,
    hsdp_mesh,
    tp,
    tp_with_sequence_parallel_norm,
    fsdp_with_tp,
    hsdp_inside_a_group,
    how_often_gradients_come_is_learned,
    pipeline_1f1b,
    pipeline_learned,
    mixed_precision,
    activation_checkpointing,
    cpu_offload,
    compiled,
    compiled_and_healed_shard_to_shard,
    local_sgd_over_fsdp2,
    functional_collectives_by_name,
]
