"""Several sources: they share the work, and any of them may be dead, slow or damaged."""

import socket
import threading
from contextlib import ExitStack

import pytest

from ftcore.heal import HealFailed, HealServer, Offer, heal
from tests.heal.states import Proxy, bits, state


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
        source, offers = publish_same(stack, 2, bandwidth_max=4e7)
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


def test_what_progress_raises_ends_the_heal_and_its_threads():
    class QuorumChanged(Exception):
        pass

    def raise_once_under_way(progress):
        if progress.bytes_done:
            raise QuorumChanged

    before = threading.active_count()
    with ExitStack() as stack:
        _, offers = publish_same(stack, 1)
        with pytest.raises(QuorumChanged):
            heal(
                offers,
                into=state(1, megabytes=16),
                bandwidth_max=1e8,
                progress=raise_once_under_way,
            )
    assert threading.active_count() == before


def test_a_source_that_says_nothing_holds_up_nobody_who_wants_to_end_the_heal():
    """A stopped process still accepts connections."""

    class QuorumBroke(Exception):
        pass

    def broke(progress):
        raise QuorumBroke

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        offer = Offer(address=address, token="t", step=1, quorum_id=4, layout_hash=0)
        before = threading.active_count()
        with pytest.raises(QuorumBroke):
            heal([offer, offer], into=state(1), silent_s=3600, progress=broke)
    assert threading.active_count() == before
