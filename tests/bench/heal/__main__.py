"""Measure heals between two processes on loopback, with torchft's HTTP transport in the same run.

    python -m tests.bench.heal [--gb 1 --gb 4] [--repeats 3]

Rate: a source that stands still, a joiner whose memory is warm. Survivor: the source trains on (a
matrix product as its forward and backward, then an in-place change of all parameters as its
optimizer step); its lost time is what its steps took longer than without a heal.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from datetime import timedelta

import torch
from torch import nn

from ftcore.heal import HealServer, heal

TENSOR_BYTES = 32 << 20


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


def train_step(model, source, step_s):
    """Half the time reads nothing of the state, as a large batch does; then all of it changes."""
    end = time.perf_counter() + step_s
    a = torch.ones(256, 256)
    while time.perf_counter() < end:
        a @ a
    source.before_step()
    with torch.no_grad():
        for weight in model.weights:
            weight.mul_(1.0)


def source_process(side, kind, gigabytes):
    torch.set_num_threads(1)
    model = Weights(gigabytes, 1.0)
    source = kind(model)
    while (command := side.recv()) is not None:
        step_s, trains = command
        if not trains:
            side.send((source.publish(), time.perf_counter()))
            side.recv()
            source.before_step()
        else:
            alone = [timed(lambda: train_step(model, source, step_s)) for _ in range(3)]
            started = time.perf_counter()
            side.send((source.publish(), started))
            steps = [time.perf_counter() - started]
            while not side.poll():
                steps.append(timed(lambda: train_step(model, source, step_s)))
            side.recv()
            base = statistics.median(alone)
            side.send(max(0.0, sum(steps) - base * (len(steps) - 1)))
        source.after_heal()
    source.close()


def timed(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(kind, gigabytes, repeats):
    """Median rate in GB/s standing still; transfer and lost seconds with a training source."""
    mine, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=source_process, args=(theirs, kind, gigabytes))
    process.start()
    model, receive = Weights(gigabytes, 0.0), kind.receiver()
    rates, training = [], []
    for _ in range(repeats):
        mine.send((0, False))
        offer, started = mine.recv()
        receive(offer, model)
        rates.append(model.nbytes / 1e9 / (time.perf_counter() - started))
        mine.send("healed")
    for _ in range(repeats):
        mine.send((0.6 * gigabytes, True))
        offer, started = mine.recv()
        receive(offer, model)
        seconds = time.perf_counter() - started
        mine.send("healed")
        training.append((seconds, mine.recv()))
    assert all(w[0].item() == 1.0 + i for i, w in enumerate(model.weights)), "the bytes are wrong"
    mine.send(None)
    process.join()
    return statistics.median(rates), sorted(training)[len(training) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["ftcore", "torchft"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| state | system | rate, source at rest | heal, source trains | survivor lost |")
    print("|---|---|---|---|---|")
    for gigabytes in options.gb or [1.0, 4.0]:
        for kind in (Ours, Peer):
            if options.only not in (None, kind.name):
                continue
            try:
                rate, (seconds, lost) = measure(kind, gigabytes, options.repeats)
            except ImportError as error:
                print(f"| {gigabytes:g} GB | {kind.name} | not installed: {error} | | |")
                continue
            print(
                f"| {gigabytes:g} GB | {kind.name} | {rate:.2f} GB/s | {seconds:.2f} s "
                f"| {lost:.2f} s ({lost / seconds:.0%}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
