import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from ftcore.heal import HealFailed, HealServer, Offer, OfferRefused, SourceLost, heal
from ftcore.heal.errors import FrameInvalid
from ftcore.statedict import LayoutDiffers, NotAtStepBoundary, StatePair, flatten
from tests.heal.states import Proxy, bits, state, train_step


@pytest.fixture
def server():
    with HealServer(stage_ahead=False) as server:
        yield server


def publish_same(stack, count, bandwidth_max=None):
    """`count` sources that hold the same state, with their offers. The first is not slowed."""
    source = state(0, megabytes=16, steps=1)
    limits = [None] + [bandwidth_max] * (count - 1)
    servers = [
        stack.enter_context(HealServer(stage_ahead=False, bandwidth_max=limit)) for limit in limits
    ]
    return source, [s.publish(source, step=1, quorum_id=4) for s in servers]


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
    from ftcore.heal.receiver import connect

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


def test_several_sources_share_the_work():
    with ExitStack() as stack:
        source, offers = publish_same(stack, 3)
        joiner = state(1, megabytes=16)
        report = heal(offers, into=joiner, bandwidth_max=1e8)
    assert bits(joiner) == bits(source)
    assert sum(s.bytes > 0 for s in report.sources) >= 2


def test_two_joiners_heal_from_one_source_at_once(server):
    source = state(0, megabytes=8, steps=1)
    joiners = [state(seed, megabytes=8) for seed in (1, 2)]
    offer = server.publish(source, step=1, quorum_id=1, readers=2)
    threads = [threading.Thread(target=heal, args=([offer],), kwargs={"into": j}) for j in joiners]
    for thread in threads:
        thread.start()
    server.gate()
    for thread in threads:
        thread.join()
    assert bits(joiners[0]) == bits(joiners[1]) == bits(source)
    assert server.wait_served(timeout_s=30)


def test_a_source_that_dies_in_mid_transfer_is_replaced_by_the_others():
    with ExitStack() as stack:
        source, offers = publish_same(stack, 2, bandwidth_max=1e8)
        dying = stack.enter_context(Proxy(offers[0], passed_max=10_000_000))
        joiner = state(1, megabytes=16)
        report = heal([dying.offer, offers[1]], into=joiner)
    assert bits(joiner) == bits(source)
    assert report.sources[0].lost and not report.sources[1].lost


def test_a_primary_that_is_dead_already_is_replaced():
    with ExitStack() as stack:
        source, offers = publish_same(stack, 2)
        dead = Offer.from_json(offers[0].to_json() | {"address": "127.0.0.1:1"})
        joiner = state(1, megabytes=16)
        heal([dead, offers[1]], into=joiner)
    assert bits(joiner) == bits(source)


def test_when_the_only_source_dies_the_failure_says_that_the_state_is_torn():
    with ExitStack() as stack:
        _, offers = publish_same(stack, 1)
        dying = stack.enter_context(Proxy(offers[0], passed_max=10_000_000))
        with pytest.raises(HealFailed, match="bytes arrived") as failure:
            heal([dying.offer], into=state(1, megabytes=16))
    assert failure.value.is_torn and failure.value.retryable


def test_a_buffered_heal_that_fails_leaves_the_state_as_it_was():
    joiner = state(1, megabytes=16, steps=1)
    before = bits(joiner)
    with ExitStack() as stack:
        source, offers = publish_same(stack, 1)
        with Proxy(offers[0], passed_max=10_000_000) as dying, pytest.raises(HealFailed) as failure:
            heal([dying.offer], into=joiner, in_place=False)
        assert not failure.value.is_torn
        assert bits(joiner) == before
        heal(offers, into=joiner, in_place=False)
    assert bits(joiner) == bits(source)


def test_a_flipped_bit_is_noticed_and_the_part_is_sent_again():
    with ExitStack() as stack:
        source, offers = publish_same(stack, 1)
        damaging = stack.enter_context(Proxy(offers[0], flip_at=5_000_000))
        joiner = state(1, megabytes=16)
        report = heal([damaging.offer], into=joiner)
    assert bits(joiner) == bits(source)
    assert damaging._flip_at is None and report.sources[0].lost is None


def test_a_flipped_bit_in_the_manifest_is_noticed():
    with ExitStack() as stack:
        _, offers = publish_same(stack, 1)
        damaging = stack.enter_context(Proxy(offers[0], flip_at=1_000))
        with pytest.raises(HealFailed, match="manifest"):
            heal([damaging.offer], into=state(1, megabytes=16))


def test_a_slow_source_holds_up_nobody():
    with ExitStack() as stack:
        source, offers = publish_same(stack, 2)
        slow = stack.enter_context(Proxy(offers[1], trickle_bytes=1000))
        joiner = state(1, megabytes=16)
        report = heal([offers[0], slow.offer], into=joiner)
    assert bits(joiner) == bits(source)
    assert report.sources[1].bytes == 0


def test_a_reader_that_takes_nothing_does_not_hold_the_gate(server):
    from ftcore.heal.receiver import connect
    from ftcore.heal.wire import send_frame

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
    from ftcore.heal.receiver import connect

    offer = server.publish(state(0, steps=1), step=1, quorum_id=1)
    assert server.is_wanted()
    connect(offer, reader="dead", silent_s=5).close()
    assert server.wait_served(timeout_s=30)


def test_parts_that_the_joiner_has_are_not_copied_at_the_gate(server):
    source, joiner = state(0, megabytes=16, steps=1), state(1, megabytes=16)
    offer = server.publish(source, step=1, quorum_id=1)
    heal([offer], into=joiner)
    assert server._snapshot.settle(threads=2) == 0


def test_a_wrong_layout_is_refused_by_name_before_anything_is_written(server):
    joiner = state(1, megabytes=2)
    before = bits(joiner["model"])
    offer = server.publish(state(0, megabytes=1, steps=1), step=1, quorum_id=1)
    with pytest.raises(LayoutDiffers, match=r"this group has model\.layers\.1\.weight"):
        heal([offer], into=joiner)
    assert bits(joiner["model"]) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"quorum_id": 3}, "step 1 of quorum 3 is asked for, step 1 of quorum 4 is served"),
        ({"step": 9}, "step 9 of quorum 4 is asked for"),
        ({"token": "guessed"}, "the token is not that of this source"),
    ],
)
def test_a_stale_or_foreign_reader_is_refused(server, change, sentence):
    offer = server.publish(state(0), step=1, quorum_id=4)
    with pytest.raises(OfferRefused, match=sentence):
        heal([Offer.from_json(offer.to_json() | change)], into=state(1))


def test_a_retired_offer_is_refused(server):
    offer = server.publish(state(0), step=1, quorum_id=4)
    server.retire()
    with pytest.raises(OfferRefused, match="no longer served"):
        heal([offer], into=state(1))


def test_sources_that_offer_different_steps_are_refused(server):
    offer = server.publish(state(0), step=1, quorum_id=4)
    other = Offer.from_json(offer.to_json() | {"step": 2})
    with pytest.raises(HealFailed, match="do not offer the same state"):
        heal([offer, other], into=state(1))


def test_no_source_at_all_is_an_error():
    with pytest.raises(HealFailed, match="no source"):
        heal([], into=state(1))


def test_the_deadline_ends_a_heal():
    with ExitStack() as stack:
        _, offers = publish_same(stack, 1)
        with pytest.raises(HealFailed, match="deadline passed"):
            heal(offers, into=state(1, megabytes=16), bandwidth_max=1e6, deadline_s=0.3)


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


def test_garbage_on_the_port_is_survived(server):
    import socket

    offer = server.publish(state(0), step=1, quorum_id=1)
    host, _, port = offer.address.rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x02[]", b""):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
    heal([offer], into=state(1))


def test_requests_for_what_is_not_there_end_the_connection(server):
    from ftcore.heal.receiver import ask, connect

    offer = server.publish(state(0, steps=1), step=1, quorum_id=1)
    for request in (
        {"want": "part", "part": 99, "have": "0"},
        {"want": "part", "part": "0", "have": "0"},
        {"want": "part", "part": 0, "have": "f" * 9000},
        {"want": "part", "part": 0, "have": "zz"},
        {"want": "everything"},
        {},
    ):
        with connect(offer, reader="r", silent_s=5) as connection, pytest.raises(SourceLost):
            ask(connection, request)


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


def test_closing_joins_every_thread():
    before = threading.active_count()
    with HealServer() as server:
        offer = server.publish(state(0, megabytes=4, steps=1), step=1, quorum_id=1)
        heal([offer], into=state(1, megabytes=4))
    assert threading.active_count() == before


def test_an_offer_from_outside_is_validated():
    with pytest.raises(FrameInvalid):
        Offer.from_json({"address": "x:1", "token": "t", "step": "1"})
