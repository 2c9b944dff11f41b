"""The source trains on: what it may change when, and what is copied for it."""

import threading

import pytest
import torch

from ftcore.heal import HealFailed, HealServer, heal
from ftcore.heal.receiver import connect
from ftcore.heal.wire import send_frame
from ftcore.statedict import NotAtStepBoundary, StatePair
from tests.heal.states import bits, state, train_step


@pytest.fixture
def server():
    with HealServer(stage_ahead=False) as server:
        yield server


@pytest.mark.parametrize("stage_ahead", [False, True])
def test_the_source_trains_on_and_the_joiner_gets_the_step_that_was_offered(stage_ahead):
    source, joiner = state(0, megabytes=8, steps=1), state(1, megabytes=8)
    with HealServer(stage_ahead=stage_ahead) as server:
        offer = server.publish(source, step=1, quorum_id=1)
        before = bits(source)
        server.gate()
        train_step(source["model"], source["optim"], 5)
        heal([offer], into=joiner)
    assert bits(joiner) == before != bits(source)


def test_the_gate_may_come_in_mid_transfer(server):
    source, joiner = state(0, megabytes=16, steps=1), state(1, megabytes=16)
    before = bits(source)
    offer = server.publish(source, step=1, quorum_id=1)
    half = threading.Event()
    healer = threading.Thread(
        target=lambda: heal([offer], into=joiner, progress=lambda p: half.set(), bandwidth_max=4e8)
    )
    healer.start()
    half.wait()
    server.gate()
    train_step(source["model"], source["optim"], 5)
    healer.join()
    assert bits(joiner) == before


def test_the_gate_may_come_while_the_joiner_prepares_its_state(server):
    """Between the manifest and the parts the joiner creates optimizer state, which takes time."""
    source, joiner = state(0, megabytes=8, steps=1), state(1, megabytes=8)
    source["slow"] = StatePair(lambda: 0, lambda _: None)
    before = bits(source)
    offer = server.publish(source, step=1, quorum_id=1)

    def source_trains_on():
        server.gate()
        train_step(source["model"], source["optim"], 5)
        return 0

    joiner["slow"] = StatePair(source_trains_on, lambda _: None)
    heal([offer], into=joiner)
    joiner["slow"] = source["slow"]
    assert bits(joiner) == before


def test_a_change_after_the_gate_is_no_offence(server):
    source = state(0, steps=1)
    server.publish(source, step=1, quorum_id=1)
    server.gate()
    train_step(source["model"], source["optim"], 5)
    snapshot = server._snapshot
    snapshot._check_versions(range(len(snapshot._moving)))
    assert snapshot.is_intact()


def test_a_reader_that_died_does_not_take_the_place_of_one_that_comes_later(server):

    source, joiner = state(0, megabytes=8, steps=1), state(1, megabytes=8)
    offer = server.publish(source, step=1, quorum_id=1)
    before = bits(source)
    connect(offer, reader="dead", silent_s=5).close()
    assert server.wait_served(timeout_s=30)
    server.gate()
    train_step(source["model"], source["optim"], 5)
    heal([offer], into=joiner)
    assert bits(joiner) == before


def test_a_forgotten_gate_is_noticed_and_nothing_torn_is_believed(server):
    source, joiner = state(0, steps=1), state(1)
    offer = server.publish(source, step=1, quorum_id=1)
    train_step(source["model"], source["optim"], 5)
    with pytest.raises(HealFailed, match="changed while"):
        heal([offer], into=joiner)


def test_buffers_may_change_at_once_since_they_are_copied(server):
    source, joiner = state(0, steps=1), state(1)
    offer = server.publish(source, step=1, quorum_id=1)
    source["model"](torch.ones(1, 512))
    heal([offer], into=joiner)
    assert joiner["model"].calls == 1


def test_a_reader_that_takes_nothing_does_not_hold_the_gate(server):

    source, joiner = state(0, megabytes=16, steps=1), state(1, megabytes=16)
    offer = server.publish(source, step=1, quorum_id=1, readers=2)
    before = bits(source)
    with connect(offer, reader="asleep", silent_s=5) as asleep:
        send_frame(asleep, {"want": "part", "part": 0, "have": "0"})
        server.gate()
        train_step(source["model"], source["optim"], 5)
        heal([offer], into=joiner)
    assert bits(joiner) == before


def test_a_reader_that_dies_is_not_waited_for(server):

    offer = server.publish(state(0, steps=1), step=1, quorum_id=1)
    assert server.is_wanted()
    connect(offer, reader="dead", silent_s=5).close()
    assert server.wait_served(timeout_s=30)


def test_parts_that_the_joiner_has_are_not_copied_at_the_gate(server):
    source, joiner = state(0, megabytes=16, steps=1), state(1, megabytes=16)
    offer = server.publish(source, step=1, quorum_id=1)
    heal([offer], into=joiner)
    assert server._snapshot.settle(threads=2) == 0


def test_only_one_thread_publishes(server):
    server.publish(state(0), step=1, quorum_id=1)
    errors = []

    def other():
        try:
            server.publish(state(0), step=2, quorum_id=1)
        except NotAtStepBoundary as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert errors


def test_memory_that_was_touched_beforehand_is_used_and_kept():
    source, joiner = state(0, megabytes=8, steps=1), state(1, megabytes=8)
    with HealServer(stage_ahead=False) as server:
        server.prefault(source)
        server._staging.wait_prefaulted()
        place = server._staging.memory(1).data_ptr()
        for step in (1, 2):
            offer = server.publish(source, step=step, quorum_id=1)
            before = bits(source)
            server.gate()
            train_step(source["model"], source["optim"], step)
            heal([offer], into=joiner)
            assert bits(joiner) == before
            assert server._staging.memory(1).data_ptr() == place


def test_staging_memory_is_given_back_when_it_is_not_to_be_kept():
    with HealServer(keep_staging=False) as server:
        server.publish(state(0, steps=1), step=1, quorum_id=1)
        server.gate()
        server.retire()
        assert len(server._staging._memory) == 0
