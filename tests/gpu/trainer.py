"""The trainer that the GPU stories run: NCCL across groups, one rank or FSDP2 over two inside."""

import logging
import os
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from ftcore import Manager
from ftcore.base.errors import FtError
from ftcore.demo.worker import ONE_GPU, sha256
from ftcore.process_group.nccl import NcclGroup

WIDTH = 512


def main(pipe, config):
    from tests.manager.jobs import Events

    rank, ranks = config.get("rank", 0), config.get("ranks", 1)
    os.environ.update(ONE_GPU, NCCL_HOSTID=f"{config['replica_id']}-{rank}")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), CUBLAS_WORKSPACE_CONFIG=":4096:8")
    os.environ.update(config.get("env", {}))
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    events = Events(pipe)
    log = logging.getLogger("ftcore")
    log.setLevel(logging.DEBUG)
    log.addHandler(events)
    try:
        events.say("finished", sha=train(config, events))
    except FtError as error:
        events.say("error", kind=type(error).__name__, what=str(error), remedy=error.remedy)
    pipe.close()
    os._exit(0)  # threads of NCCL may outlive the group


def make_model(config, device):
    torch.manual_seed(7)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1))
    model.to(device)
    if config.get("ranks", 1) > 1:
        store = dist.FileStore(config["meeting"], config["ranks"])
        dist.init_process_group(
            "nccl", store=store, rank=config["rank"], world_size=config["ranks"], device_id=device
        )
        for layer in layers:
            fully_shard(model[layers.index(layer)])
        fully_shard(model)
    return model


def train(config, events):
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    model = make_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Manager(
        model,
        optimizer,
        shards=config["shards"],
        group=NcclGroup(device=device),
        lighthouse=config["lighthouse"],
        replica_id=config["replica_id"],
        **config.get("options", {}),
    ) as manager:
        kept = torch.arange(1 << 20, device=device)  # it lives as long as the CUDA context
        for step in manager.steps(config["steps"]):
            for shard in step:
                events.say("shard", step=shard.step, shard=shard.index)
                inputs = torch.randn(32, WIDTH, device=device)
                loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
                loss.backward()
                shard.log(loss)
                if step.index == config.get("hang_at"):
                    wait_for_a_batch_that_never_comes()
            optimizer.step()
            if config.get("audits"):
                assert torch.equal(kept, torch.arange(1 << 20, device=device))
                events.say("audit", step=step.index, **audit())
            time.sleep(config.get("step_time_s", 0.0))
    return sha256(p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())


def wait_for_a_batch_that_never_comes():
    threading.Event().wait()


def audit():
    """What a process holds: a leak shows in one of these."""
    with open("/proc/self/status") as status:
        facts = dict(line.split(":", 1) for line in status)
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(facts["Threads"]),
        "host_mib": int(facts["VmRSS"].split()[0]) >> 10,
        "tensors_mib": round(torch.cuda.memory_allocated() / 2**20, 2),
        "reserved_mib": torch.cuda.memory_reserved() >> 20,
        "device_free_mib": torch.cuda.mem_get_info()[0] >> 20,  # of all processes together
    }
