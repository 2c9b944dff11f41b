"""Measure heals between two processes on loopback: the transports alone, without managers.

Rate: a source that stands still, a joiner whose memory is warm. Survivor: the source trains on (a
number of matrix products as its forward and backward, then an in-place change of all parameters as
its optimizer step). Stalled is what it spent in the transport on its training thread; lost is what
its steps took longer than without a heal. CPU is that of both processes, and does not depend on
what else the machine does.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
import warnings
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler

import torch
from torch import nn

from ftcore.heal import HealServer, heal
from tests.bench.heal.work import calibrate, multiply

TENSOR_BYTES = 32 << 20
STEP_S = 0.6  # compute of one step for each GB of state


class Weights(nn.Module):
    def __init__(self, gigabytes, value):
        super().__init__()
        count = int(gigabytes * 1e9 / TENSOR_BYTES)
        size = TENSOR_BYTES // 4
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((size,), value + i)) for i in range(count)
        )

    @property
    def nbytes(self):
        return len(self.weights) * TENSOR_BYTES


class Ours:
    name = "ftcore"

    def __init__(self, model):
        self.server, self.model, self.id = HealServer(), model, 0
        self.server.prefault({"model": model})

    def publish(self):
        self.id += 1
        return self.server.publish({"model": self.model}, step=self.id, quorum_id=self.id)

    def before_step(self):
        self.server.gate()

    def after_heal(self):
        self.server.retire()

    def close(self):
        self.server.close()

    @staticmethod
    def receiver():
        return lambda offer, model: heal([offer], into={"model": model})


class Peer:
    name = "torchft"

    def __init__(self, model):
        from torchft.checkpointing.http_transport import HTTPTransport

        BaseHTTPRequestHandler.log_message = lambda *_: None
        self.transport = HTTPTransport(timeout=timedelta(seconds=300), num_chunks=0)
        self.model, self.id, self.is_serving = model, 0, False

    def publish(self):
        self.id += 1
        self.is_serving = True
        state = {"model": self.model.state_dict()}
        self.transport.send_checkpoint([1], self.id, state, timedelta(seconds=300))
        return self.transport.metadata(), self.id

    def before_step(self):
        if self.is_serving:  # as its manager does before a commit
            self.transport.disallow_checkpoint()
            self.is_serving = False

    def after_heal(self):
        pass

    def close(self):
        self.transport.shutdown()

    @staticmethod
    def receiver():
        from torchft.checkpointing.http_transport import HTTPTransport

        transport = HTTPTransport(timeout=timedelta(seconds=300), num_chunks=0)

        def receive(offer, model):
            address, step = offer
            state = transport.recv_checkpoint(0, address, step, timedelta(seconds=300))
            model.load_state_dict(state["model"])

        return receive


def train_step(model, source, products):
    """Compute that reads nothing of the state; then all of it changes. Returns the stall."""
    multiply(products)
    stalled = timed(source.before_step)
    with torch.no_grad():
        for weight in model.weights:
            weight.mul_(1.0)
    return stalled


def source_process(side, kind, gigabytes):
    torch.set_num_threads(1)
    model = Weights(gigabytes, 1.0)
    source = kind(model)
    while (command := side.recv()) is not None:
        step_s, trains = command
        step = partial(train_step, model, source, round(step_s / calibrate()))
        base = statistics.median(timed(step) for _ in range(3)) if trains else 0.0
        started, cpu = time.perf_counter(), time.process_time()
        offer = source.publish()
        stalled = time.perf_counter() - started
        side.send((offer, started))
        steps = 0
        while trains and not side.poll():
            stalled += step()
            steps += 1
        side.recv()
        lost = time.perf_counter() - started - base * steps
        side.send({"cpu": time.process_time() - cpu, "stalled": stalled, "lost": max(0.0, lost)})
        source.before_step()
        source.after_heal()
    source.close()


def timed(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def one_heal(side, receive, model, step_s, trains):
    side.send((step_s, trains))
    offer, started = side.recv()
    cpu = time.process_time()
    receive(offer, model)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    side.send("healed")
    facts = side.recv()
    return facts | {"seconds": seconds, "cpu": facts["cpu"] + cpu}


def measure(kind, gigabytes, repeats):
    """Medians of heals from a source at rest, and from one that trains."""
    mine, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=source_process, args=(theirs, kind, gigabytes))
    process.start()
    model, receive = Weights(gigabytes, 0.0), kind.receiver()
    runs = {
        trains: [one_heal(mine, receive, model, STEP_S * gigabytes, trains) for _ in range(repeats)]
        for trains in (False, True)
    }
    assert all(w[0].item() == 1.0 + i for i, w in enumerate(model.weights)), "the bytes are wrong"
    mine.send(None)
    process.join()
    return model.nbytes / 1e9, {
        trains: {key: statistics.median(run[key] for run in of) for key in of[0]}
        for trains, of in runs.items()
    }


def table(sizes, *, systems, repeats):
    """Lines of a table, as they are measured."""
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    yield "| state | system | at rest | CPU | heal while training | stalled | lost |"
    yield "|---|---|---|---|---|---|---|"
    for gigabytes in sizes:
        for kind in (Ours, Peer):
            if kind.name in systems:
                yield row(kind, gigabytes, *measure(kind, gigabytes, repeats))


def row(kind, gigabytes, moved, runs):
    rest, busy = runs[False], runs[True]
    return (
        f"| {gigabytes:g} GB | {kind.name} | {moved / rest['seconds']:.2f} GB/s "
        f"| {rest['cpu'] / moved:.2f} s/GB | {busy['seconds']:.2f} s "
        f"| {busy['stalled']:.3f} s ({busy['stalled'] / busy['seconds']:.0%}) "
        f"| {busy['lost']:.2f} s ({busy['lost'] / busy['seconds']:.0%}) |"
    )
