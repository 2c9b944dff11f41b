"""A heal that breaks off is gone on with: by the next one, of the same state and no other."""

from contextlib import ExitStack

import pytest
import torch

from ftcore.heal import HealFailed, HealServer, Partial, heal
from tests.heal.states import bits, state

MEGABYTES = 16


@pytest.fixture
def sources():
    with ExitStack() as stack:
        source = state(0, MEGABYTES, steps=1)
        servers = [stack.enter_context(HealServer(stage_ahead=False)) for _ in range(2)]
        yield source, servers


class QuorumBroke(Exception):
    pass


def break_off(progress):
    if progress.bytes_done:
        raise QuorumBroke


def broken_off(offer, joiner, **options):
    """What is left of a heal that ended when its first part had come."""
    partial = Partial()
    with pytest.raises(QuorumBroke):
        heal(
            [offer], into=joiner, partial=partial, progress=break_off, bandwidth_max=2e8, **options
        )
    return partial


@pytest.mark.parametrize("in_place", [True, False])
def test_the_next_heal_of_the_same_state_asks_only_for_what_is_missing(sources, in_place):
    source, (first, second) = sources
    joiner = state(1, MEGABYTES)
    offer = first.publish(source, step=1, quorum_id=4, state_id="1.3")
    partial = broken_off(offer, joiner, in_place=in_place)
    again = second.publish(source, step=1, quorum_id=5, state_id="1.3")
    report = heal([again], into=joiner, partial=partial, in_place=in_place)
    assert 0 < report.resumed_bytes < report.bytes
    assert sum(s.bytes for s in report.sources) + report.resumed_bytes <= report.bytes
    assert bits(joiner) == bits(source)


@pytest.mark.parametrize(("before", "after"), [("1.3", "2.3"), ("1.3", "1.4"), ("", "")])
def test_a_heal_of_another_or_an_unnamed_state_starts_anew(sources, before, after):
    source, (first, second) = sources
    joiner = state(1, MEGABYTES)
    partial = broken_off(first.publish(source, step=1, quorum_id=4, state_id=before), joiner)
    again = second.publish(source, step=1, quorum_id=5, state_id=after)
    report = heal([again], into=joiner, partial=partial)
    assert report.resumed_bytes == 0
    assert bits(joiner) == bits(source)


def test_what_somebody_changed_meanwhile_is_received_again(sources):
    source, (first, second) = sources
    joiner = state(1, MEGABYTES)
    partial = broken_off(first.publish(source, step=1, quorum_id=4, state_id="1.3"), joiner)
    with torch.no_grad():
        next(joiner["model"].parameters()).zero_()
    again = second.publish(source, step=1, quorum_id=5, state_id="1.3")
    assert heal([again], into=joiner, partial=partial).resumed_bytes == 0
    assert bits(joiner) == bits(source)


def test_it_may_break_off_again_and_again(sources):
    source, (server, _) = sources
    joiner, partial, seen = state(1, MEGABYTES), Partial(), [0]

    def break_off_after_more(progress):
        if progress.bytes_done > seen[-1]:
            seen.append(progress.bytes_done)
            raise QuorumBroke

    for quorum_id in range(100):
        offer = server.publish(source, step=1, quorum_id=quorum_id, state_id="1.3")
        try:
            heal([offer], into=joiner, partial=partial, progress=break_off_after_more)
            break
        except QuorumBroke:
            pass
    assert len(seen) > 2 and bits(joiner) == bits(source)


def test_after_a_heal_that_succeeded_nothing_is_kept(sources):
    source, (server, _) = sources
    joiner, partial = state(1, MEGABYTES), Partial()
    for _ in range(2):
        offer = server.publish(source, step=1, quorum_id=4, state_id="1.3")
        assert heal([offer], into=joiner, partial=partial).resumed_bytes == 0


def test_sources_that_name_their_states_differently_are_refused(sources):
    source, servers = sources
    offers = [
        s.publish(source, step=1, quorum_id=4, state_id=f"1.{i}") for i, s in enumerate(servers)
    ]
    with pytest.raises(HealFailed, match="do not offer the same state"):
        heal(offers, into=state(1, MEGABYTES))
