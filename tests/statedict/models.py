"""Small models and optimizers for the stories of this folder."""

import torch
from torch import nn


def make(seed=0, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, optimizer(model.parameters(), lr=1e-2, **options)


def train(model, optimizer, steps=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator)).pow(2).mean().backward()
        optimizer.step()


def copy_over(source, target):
    """What a heal does, without a network: fill the tensors, then load the plain values."""
    from ftcore.statedict import first_difference, flatten, prepare
    from ftcore.statedict.memory import copy_in

    sent = flatten(source)
    flat = prepare(target, sent.layout, sent.plain)
    assert first_difference(flat.layout, sent.layout) is None
    for mine, theirs in zip(flat.tensors, sent.tensors, strict=True):
        copy_in(theirs.tensor.clone().reshape(-1).view(torch.uint8), mine.tensor)
    flat.load(sent.plain)
    return flat


def bits(state):
    """Everything in a state, comparable with ==."""
    from ftcore.statedict import flatten

    flat = flatten(state)
    raw = [bytes(t.tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) for t in flat.tensors]
    return flat.layout, raw, flat.plain
