"""The trainer that the tests run: a tiny model on a stream of seeded random batches."""

import logging
import os
import signal
import threading
import time

import torch
import torch.nn.functional as F

import ftcore
from ckpt import Checkpointer
from ftcore import ElasticSampler, Manager
from ftcore.base.errors import FtError
from ftcore.demo.worker import sha256


def main(pipe, config):
    from tests.manager.jobs import Events

    os.environ.update(config.get("env", {}))
    torch.set_num_threads(1)
    ftcore.manager.__version__ = config.get("version", ftcore.__version__)
    torch.manual_seed(config.get("model_seed", 7))
    events = Events(pipe)
    for name, level in (("ftcore", logging.DEBUG), ("ckpt", logging.INFO)):
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(events)
    try:
        events.say("finished", sha=train(config, events))
    except FtError as error:
        events.say("error", kind=type(error).__name__, what=str(error), remedy=error.remedy)
    pipe.close()


def train(config, events):
    width = config.get("width", 16)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if config.get("mode") == "elastic":
        return train_as_it_was(model, optimizer, config, events)
    options = dict(config.get("options", {}))
    holds = config.get("holds", {})
    if holds:
        options.setdefault("hang_after_s", 0.0)
    if where := config.get("checkpoints"):
        options["checkpoints"] = Checkpointer(where, **config.get("checkpointer", {}))
    if size := config.get("data"):
        options["data"] = ElasticSampler(size, shards=config["shards"], per_shard=2, seed=3)
    if reason := options.pop("guard", ""):
        options["guard"] = lambda step: reason
    if preemption := options.pop("preemption", None):
        options["preemption"] = ftcore.Preemption(**preemption)
    if ailment := options.pop("ailment", None):
        options["health"] = [lambda patient: ailment]
    options["on_notice"] = lambda notice: events.say("noticed", why=notice.reason)
    with Manager(
        model,
        optimizer,
        shards=config["shards"],
        mode=config.get("mode", "exact"),
        lighthouse=config["lighthouse"],
        replica_id=config["replica_id"],
        **options,
    ) as manager:
        if trap := config.get("trap"):
            set_trap(manager, events, config["armed"], *trap)
        drain_after = config.get("drain_after")
        for count, step in enumerate(manager.steps(config["steps"])):
            if step.index in holds:
                holds[step.index].wait()
            if count == drain_after:
                manager.drain("preempted")
            for shard in step:
                events.say("shard", step=shard.step, shard=shard.index, samples=shard.samples)
                inputs = torch.randn(4, 8)  # what this shard's seed gives
                loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
                loss = loss * wrong_factor(config, step)
                loss.backward()
                shard.log(loss)
                if step.index == config.get("raise_at"):
                    raise ValueError("a bug in the user's loop")
                if step.index == config.get("hang_at"):
                    wait_for_a_batch_that_never_comes()
                time.sleep(config.get("shard_time_s", 0.0))
            optimizer.step()
            if step.index in config.get("flip_after", ()):
                model[0].weight.data.view(torch.int32)[0, 0] ^= 1
            time.sleep(config.get("step_time_s", 0.0))
        events.say("ended_loop", committed=manager.state.committed, why=manager.drained_because)
    return sha256(model.parameters())


def set_trap(manager, events, armed, when, what, gate=None):
    """At the moment `when` of a heal ("offered" by a source, "received" by its target) `what`
    happens, once it is armed: "die", "raise", or "wait" for the gate that the test opens."""

    def spring(now):
        if now != when or not armed.is_set():
            return
        events.say("trapped", what=what)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "raise":
            raise ValueError("a bug in the user's state function")
        else:
            gate.wait()

    def get():
        spring("offered")
        return {"nothing": 0}

    manager.register_state("trap", get, lambda _: spring("received"))


def wrong_factor(config, step):
    """What this group multiplies its losses by, in the first attempts at a step or in all."""
    at, factor, attempts = config.get("wrong", (-1, 1.0, 0))
    return factor if step.index == at and len(step.failures) < attempts else 1.0


def wait_for_a_batch_that_never_comes():
    threading.Event().wait()


def train_as_it_was(model, optimizer, config, events):
    """The plain loop, with nothing but its optimizer wrapped."""
    optimizer = ftcore.wrap(
        model,
        optimizer,
        steps=config["steps"],
        lighthouse=config["lighthouse"],
        replica_id=config["replica_id"],
        **config.get("options", {}),
    )
    holds = config.get("holds", {})
    while not optimizer.is_done:
        if optimizer.index in holds:
            holds[optimizer.index].wait()
        optimizer.zero_grad()
        events.say("shard", step=optimizer.index)
        inputs = torch.randn(4, 8)
        F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        index = optimizer.index
        optimizer.step()
        if index in config.get("flip_after", ()):
            model[0].weight.data.view(torch.int32)[0, 0] ^= 1
        time.sleep(config.get("step_time_s", 0.0))
    optimizer.manager.close()
    return sha256(model.parameters())
