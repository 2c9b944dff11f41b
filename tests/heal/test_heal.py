"""A joiner becomes its source, bit for bit and in place."""

import threading

import pytest
import torch
from torch import nn

from ftcore.heal import HealServer, heal
from ftcore.statedict import flatten
from tests.heal.states import bits, state


@pytest.fixture
def server():
    with HealServer(stage_ahead=False) as server:
        yield server


def test_a_joiner_becomes_its_source_bit_for_bit(server):
    source, joiner = state(0, steps=2), state(1)
    offer = server.publish(source, step=2, quorum_id=4)
    report = heal([offer], into=joiner)
    assert bits(joiner) == bits(source)
    assert (report.step, report.quorum_id) == (2, 4)
    assert report.bytes == flatten(source).layout.nbytes


def test_bytes_go_straight_into_the_live_tensors(server):
    source, joiner = state(0, steps=1), state(1, steps=1)
    places = [t.tensor.data_ptr() for t in flatten(joiner).tensors]
    heal([server.publish(source, step=1, quorum_id=1)], into=joiner)
    assert [t.tensor.data_ptr() for t in flatten(joiner).tensors] == places


def test_progress_is_told_on_the_calling_thread(server):
    seen = []
    offer = server.publish(state(0, megabytes=4, steps=1), step=1, quorum_id=1)
    heal(
        [offer],
        into=state(1, megabytes=4),
        progress=lambda p: seen.append((p.bytes_done, p.bytes_total, threading.get_ident())),
    )
    assert seen[-1][0] == seen[-1][1] > 0
    assert {thread for _, _, thread in seen} == {threading.get_ident()}


def test_tensors_of_every_shape_and_stride_are_healed(server):
    class Odd(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.transposed = nn.Parameter(torch.randn(3, 5).t())
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.scalar = nn.Parameter(torch.randn(()))
            self.small = nn.Parameter(torch.randn(7).bfloat16())
            self.tied = self.scalar

    source, joiner = Odd(0), Odd(1)
    offer = server.publish({"m": source}, step=0, quorum_id=1)
    heal([offer], into={"m": joiner})
    assert bits({"m": joiner}) == bits({"m": source})
    assert joiner.transposed.stride() == source.transposed.stride()


def test_an_empty_state_is_healed_too(server):
    target = {}
    heal([server.publish({"step": 3}, step=3, quorum_id=1)], into=target)
    assert target == {"step": 3}


def test_closing_joins_every_thread():
    before = threading.active_count()
    with HealServer() as server:
        offer = server.publish(state(0, megabytes=4, steps=1), step=1, quorum_id=1)
        heal([offer], into=state(1, megabytes=4))
    assert threading.active_count() == before
