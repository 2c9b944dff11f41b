"""FSDP2 states on some gloo processes: what each rank runs."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def run(world_size, body, *arguments):
    """Run `body(rank, *arguments)` on that many processes; a failure of one fails the test."""
    with tempfile.NamedTemporaryFile() as meeting:
        spawned = (world_size, meeting.name, body, arguments)
        mp.start_processes(_rank, spawned, nprocs=world_size, start_method="spawn")


def _rank(rank, world_size, meeting, body, arguments):
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    body(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo threads may outlive the group


def trained(seed, steps=1):
    """Uneven shards: 7 rows on 2 or 3 ranks, and one row on all."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 7), torch.nn.Linear(7, 1), torch.nn.Linear(1, 5, bias=False)
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(seed + step)
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(model, optimizer):
    """All tensors whole, by name."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    found = {n: t.full_tensor() for n, t in of_model.items()}
    for name, values in of_optimizer["state"].items():
        whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}
        found |= {f"{name}/{k}": v for k, v in whole.items()}
    return found


def expect_same(model, optimizer, path):
    found, wanted = full(model, optimizer), torch.load(path)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def keep(rank, model, optimizer, path):
    tensors = full(model, optimizer)
    if rank == 0:
        torch.save(tensors, path)


def save_all(rank, directory):
    """The same sharded state three times: by us, by DCP on our format, and by stock DCP."""
    from ckpt import Checkpointer
    from ckpt.interop import CkptWriter

    model, optimizer = trained(1)
    keep(rank, model, optimizer, f"{directory}/expected")
    with Checkpointer(f"{directory}/ours") as checkpoints:
        checkpoints.save({"model": model, "optimizer": optimizer}, step=3).wait_durable()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.save(state, storage_writer=CkptWriter(f"{directory}/by-dcp", step=3))
    dcp.save(state, checkpoint_id=f"{directory}/stock")


def load_all(rank, directory):
    for name in ("ours", "by-dcp"):
        load_by_dcp(f"{directory}/{name}", f"{directory}/expected")
        restore(f"{directory}/{name}", f"{directory}/expected")
    restore_stock(f"{directory}/stock", f"{directory}/expected")


def load_by_dcp(run_dir, expected):
    from ckpt.interop import CkptReader

    model, optimizer = trained(2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, storage_reader=CkptReader(run_dir))
    named = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **named)
    expect_same(model, optimizer, expected)


def restore_stock(run_dir, expected):
    from ckpt.interop import restore_foreign

    model, optimizer = trained(2)
    restore_foreign({"model": model, "optimizer": optimizer}, run_dir)
    expect_same(model, optimizer, expected)


def restore(run_dir, expected):
    from ckpt import Checkpointer

    model, optimizer = trained(2)
    with Checkpointer(run_dir) as checkpoints:
        assert checkpoints.restore({"model": model, "optimizer": optimizer}) == 3
    expect_same(model, optimizer, expected)
