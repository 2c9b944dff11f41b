"""A group of two ranks that share each shard by the inner parallelism INNER, for test_ranks.py."""

import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ftcore import Guards, Manager
from ftcore.demo.worker import sha256

STEPS, HOLD_AT = 60, 30


def say(line):
    """One write, because two ranks share the pipe."""
    os.write(1, f"{line}\n".encode())


class SayAttached(logging.Handler):
    """Tells the test that this group has said hello, so that the others may go on."""

    def emit(self, record):
        if record.getMessage() == "manager.attached":
            say(f"ATTACHED {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")


def hold():
    """Until the test has seen the group come back that it killed, if it wants that."""
    while "GATE" in os.environ and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)


def loss_of(output, _=None):
    return output.square().mean()


def pipeline(part, rank):
    """1F1B with two microbatches; each rank holds one stage."""
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    options = {"n_microbatches": 2, "loss_fn": loss_of, "scale_grads": False}
    schedule = Schedule1F1B(stage, **options)
    return lambda x: schedule.step(x) if rank == 0 else schedule.step(target=x)


def parallel(inner, kind, rank):
    """What this rank holds of the model, and how it runs one shard forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    if kind == "pp":
        part = inner[:2] if rank == 0 else inner[2:]
        return part, pipeline(part, rank)
    if kind == "tp":
        parallelize_module(inner, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return inner, lambda x: loss_of(inner(x)).backward()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(inner)
        return inner, lambda x: loss_of(model(x[rank::2])).backward()
    fully_shard(inner[0], mesh=mesh)
    fully_shard(inner, mesh=mesh)
    return inner, lambda x: loss_of(inner(x[rank::2])).backward()


def whole(param):
    return param.full_tensor() if isinstance(param, DTensor) else param


def main():
    torch.set_num_threads(1)
    log = logging.getLogger("ftcore")
    log.setLevel(logging.INFO)
    log.addHandler(SayAttached())
    dist.init_process_group("gloo")
    kind, rank = os.environ.get("INNER", "ddp"), dist.get_rank()
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model, run = parallel(inner, kind, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guards = Guards(norm_spike_factor=100, digest_every_steps=1)
    limits = {"hang_after_s": 0.0}  # it holds for as long as the test likes
    if limit_s := os.environ.get("LIMIT_S"):
        limits = {"collective_timeout_s": float(limit_s)}
    with Manager(model, optimizer, shards=2, guards=guards, **limits) as manager:
        for step in manager.steps(STEPS):
            if step.index == HOLD_AT:
                hold()
            for _ in step:
                run(torch.randn(8, 8))
            optimizer.step()
            say(f"STEP {step.index} {len(step.members)} {os.getpid()}")
            time.sleep(0.1)
    say(f"SHA {sha256(whole(p) for p in model.parameters())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
