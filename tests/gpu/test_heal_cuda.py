"""Heals of states on a GPU: `python3 -m pytest tests/gpu/test_heal_cuda.py -s`."""

import threading
import time

import pytest
import torch
from torch import nn

from ftcore.heal import HealServer, heal
from ftcore.statedict import flatten

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def state(seed, width, layers):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def train_step(state, server=None):
    model, optimizer = state["model"], state["optim"]
    optimizer.zero_grad()
    for _ in range(4):
        x = torch.ones(4096, model[0].in_features, device="cuda")
        model(x).pow(2).mean().backward()
    if server is not None:
        server.gate()
    optimizer.step()


def clones(state):
    return [t.tensor.clone() for t in flatten(state).tensors]


def equal(state, tensors):
    mine = flatten(state).tensors
    return all(
        torch.equal(t.tensor.contiguous().view(torch.uint8).cpu(), c.view(torch.uint8).cpu())
        if t.tensor.dim()
        else torch.equal(t.tensor.cpu(), c.cpu())
        for t, c in zip(mine, tensors, strict=True)
    )


def test_a_joiner_on_a_gpu_becomes_its_source_while_that_trains_on():
    source, joiner = state(0, 512, 8), state(1, 512, 8)
    train_step(source)
    with HealServer() as server:
        offer = server.publish(source, step=1, quorum_id=1)
        before = clones(source)
        healer = threading.Thread(target=heal, args=([offer],), kwargs={"into": joiner})
        healer.start()
        for _ in range(5):
            train_step(source, server)
        healer.join()
    assert equal(joiner, before) and not equal(source, before)


def test_a_state_that_is_still_being_computed_is_served_as_it_will_be():
    source, joiner = state(0, 2048, 8), state(1, 2048, 8)
    train_step(source)
    with HealServer() as server:
        for _ in range(20):
            train_step(source)  # queued, not finished
        offer = server.publish(source, step=1, quorum_id=1)
        heal([offer], into=joiner)
        assert equal(joiner, clones(source))


def test_what_a_survivor_loses_is_measured():
    source, joiner = state(0, 8192, 10), state(1, 8192, 10)
    for _ in range(5):
        train_step(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        train_step(source)
        torch.cuda.synchronize()
    alone = (time.perf_counter() - started) / 5
    with HealServer() as server:
        server.prefault(source)
        server._staging.wait_prefaulted()
        started = time.perf_counter()
        offer = server.publish(source, step=1, quorum_id=1)
        published = time.perf_counter() - started
        report = {}

        def receive():
            report["heal"] = heal([offer], into=joiner)

        healer = threading.Thread(target=receive)
        healer.start()
        steps, gates = [], 0.0
        while healer.is_alive():
            begun = time.perf_counter()
            model, optimizer = source["model"], source["optim"]
            optimizer.zero_grad()
            for _ in range(4):
                x = torch.ones(4096, 8192, device="cuda")
                model(x).pow(2).mean().backward()
            gates += server.gate()
            optimizer.step()
            torch.cuda.synchronize()
            steps.append(time.perf_counter() - begun)
        healer.join()
    lost = published + sum(steps) - alone * len(steps)
    size = report["heal"].bytes / 1e9
    print(f"\n{size:.1f} GB on the GPU: heal {report['heal'].seconds:.2f} s, step {alone:.3f} s,")
    print(f"publish {published:.4f} s, gates {gates:.3f} s, steps {len(steps)}, lost {lost:.3f} s")
    assert equal(joiner, clones(source)) is False
