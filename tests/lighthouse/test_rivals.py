"""Two lives under one replica_id: the lighthouse keeps the one that lives."""

import pytest

from ftcore.wire.messages import Hello, Member, Refused, Report, Want
from lighthouse.core import JobCore
from lighthouse.quorum import Policy


def report(incarnation, number=1, **facts):
    member = Member(replica_id="r0", incarnation=incarnation)
    return Report(member=member, number=number, want=facts.pop("want", Want.SEAT), **facts)


@pytest.fixture
def core():
    """A lighthouse that knows life 1 of r0 and has just heard the hello of life 2."""
    core = JobCore("job", Policy(), first_id=1, now=0.0, must_learn=False)
    core.hello(Hello(job="job", report=report(1)), 0.0)
    core.hello(Hello(job="job", report=report(2)), 0.1)
    return core


def refused(turn):
    return [life for life, order in turn.orders if isinstance(order, Refused)]


def seated(core):
    return core.seats["r0"].report.member.incarnation


def test_the_second_one_is_refused_when_the_first_is_heard_again(core):
    at = 0.1 + core.policy.reattach_timeout_s
    assert refused(core.report(report(1, number=2), at)) == [("r0", 2)]
    assert seated(core) == 1


def test_a_report_of_the_first_that_may_be_old_decides_nothing(core):
    assert refused(core.report(report(1, number=2), 0.2)) == []


def test_the_second_one_takes_the_seat_when_the_stream_of_the_first_has_closed(core):
    core.closed(("r0", 1), 0.2)
    core.poll(10.0)
    assert seated(core) == 2


def test_the_last_words_of_the_first_give_its_seat_to_the_second(core):
    turn = core.report(report(1, number=2, want=Want.GONE, reason="a rank died"), 0.2)
    assert refused(turn) == []
    assert seated(core) == 2


def test_the_first_one_is_refused_nothing_after_its_last_words(core):
    core.report(report(1, number=2, want=Want.GONE), 0.2)
    core.report(report(1, number=1), 0.3)  # late
    assert seated(core) == 2
