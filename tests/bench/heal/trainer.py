"""One replica group of the heal benchmark, ours or torchft's: says when its steps and heals ran.

The state is `gb` gigabytes: frozen weights, and a part (`trained`, 0 to 1) that Adam trains, which
counts three times. So the reduction of gradients takes little of a step unless `trained` is large.
A step computes `step_s` seconds: "device" sleeps, as a host does while its accelerator works;
"cores" multiplies matrices on one core, as many as take so long when nothing else runs.
"""

import json
import logging
import sys
import time
from datetime import timedelta

import torch
from torch import nn

from tests.bench.heal.work import multiply

TENSOR = 8 << 20  # elements: 32 MiB


class Weights(nn.Module):
    def __init__(self, gb, trained, value):
        super().__init__()
        count = max(1, round(gb * 1e9 / 4 / TENSOR))
        adam = max(1, round(count * trained / 3))
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.full((TENSOR,), value + i), requires_grad=False)
            for i in range(count - 3 * adam)
        )
        self.trained = nn.ParameterList(
            nn.Parameter(torch.full((TENSOR,), value)) for _ in range(adam)
        )
        self.nbytes = 4 * TENSOR * (len(self.frozen) + 3 * adam)

    def work(self, compute, step_s):
        """Forward and backward of one step: gradients of ones."""
        if compute == "device":
            time.sleep(step_s)
        else:
            multiply(round(step_s / self.product_s))
        for weight in self.trained:
            weight.grad = torch.ones_like(weight)


def say(**facts):
    sys.stdout.write(json.dumps({"at": time.time(), **facts}) + "\n")
    sys.stdout.flush()


class Heals(logging.Handler):
    def emit(self, record):
        if record.getMessage() == "heal.finished":
            say(event="healed", seconds=record.facts["seconds"], bytes=record.facts["bytes"])


def ours(config, model, optimizer):
    from ftcore import Manager

    log = logging.getLogger("ftcore")
    log.setLevel(logging.INFO)
    log.addHandler(Heals())
    with Manager(
        model,
        optimizer,
        mode="fast",
        shards=config["survivors"],
        lighthouse=config["address"],
        replica_id=config["name"],
        **config.get("options", {}),
    ) as manager:
        began = time.perf_counter()
        for step in manager.steps(config["steps"]):
            for _ in step:
                model.work(config["compute"], config["step_s"])
            optimizer.step()
            began = tell_step(step.index, began, len(step.members), step.times)


def tell_step(index, began, members, times=None):
    now = time.perf_counter()
    parts = {} if times is None else {n: getattr(times, n) for n in times.__slots__}
    say(event="step", step=index, seconds=now - began, members=members, **parts)
    return now


def torchft(config, model, optimizer):
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.optim import OptimizerWrapper

    class Transport(HTTPTransport):
        def recv_checkpoint(self, *arguments, **named):
            began = time.perf_counter()
            state = super().recv_checkpoint(*arguments, **named)
            say(event="healed", seconds=time.perf_counter() - began, bytes=model.nbytes)
            return state

    limit = timedelta(seconds=300)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda s: (
            model.load_state_dict(s["model"]),
            optimizer.load_state_dict(s["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=limit,
        replica_id=config["name"],
        lighthouse_addr=f"http://{config['address']}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        checkpoint_transport=Transport(timeout=limit, num_chunks=0),
    )
    wrapped = OptimizerWrapper(manager, optimizer)
    began = time.perf_counter()
    while manager.current_step() < config["steps"]:
        before = manager.current_step()
        wrapped.zero_grad()
        model.work(config["compute"], config["step_s"])
        for weight in model.trained:
            manager.allreduce(weight.grad).wait()
        wrapped.step()
        began = tell_step(before, began, manager.num_participants())


def main(config):
    torch.set_num_threads(1)
    model = Weights(config["gb"], config["trained"], config["value"])
    optimizer = torch.optim.Adam(model.trained, lr=1e-3)
    say(event="ready", bytes=model.nbytes)
    model.product_s = float(sys.stdin.readline())
    {"ours": ours, "torchft": torchft}[config["kind"]](config, model, optimizer)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
