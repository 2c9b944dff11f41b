"""A trainer process that takes outer steps of a tiny model under a real manager."""

import logging
import time

import torch
import torch.nn.functional as F

from ftcore import Manager
from ftcore.base.errors import FtError
from ftcore.demo.worker import sha256
from ftcore.local_sgd import DiLoCo


def main(pipe, config, gates):
    from tests.manager.jobs import Events

    torch.set_num_threads(1)
    torch.manual_seed(7)
    events = Events(pipe)
    log = logging.getLogger("ftcore")
    log.setLevel(logging.DEBUG)
    log.addHandler(events)
    try:
        train(config, events, gates)
    except FtError as error:
        events.say("error", kind=type(error).__name__, what=str(error), remedy=error.remedy)
    pipe.close()


def train(config, events, gates):
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Manager(
        model,
        optimizer,
        gradients=DiLoCo(**config["outer"]),
        guards=config.get("guards"),
        lighthouse=config["lighthouse"],
        replica_id=config["replica_id"],
    ) as manager:
        outer = manager.gradients
        for step in manager.steps(config["steps"]):
            for inner in step:
                if step.index == config["hold_at"]:
                    gates["go on"].wait()  # until a joiner that the test starts is there
                events.say("inner", step=inner.step, member=inner.index)
                generator = torch.Generator().manual_seed(1000 * inner.step + inner.index)
                x = torch.randn(8, 8, generator=generator)
                loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                inner.log(loss)
                time.sleep(config.get("inner_time_s", 0.0))
            if step.index == config.get("flip_after"):
                outer.fragments[0].outer.view(torch.int32)[0] ^= 1
            shas = [sha256([f.outer]) for f in outer.fragments]
            events.say("outer", step=step.index, shas=shas, loss=step.loss, members=step.members)
        events.say("finished", sha=sha256([f.outer for f in outer.fragments]))
        # Whoever leaves first breaks the group under those that still hand out the last sum.
        gates["leave"].wait()
