"""The manager's middle: what ranks say becomes one vote, what the lighthouse says reaches them."""

import pytest

from ftcore.daemon.group import Config, Group
from ftcore.wire import ftcore_pb2 as pb
from ftcore.wire.messages import (
    Drain,
    LostMember,
    Member,
    NewQuorum,
    Notice,
    Prepare,
    Quorum,
    Refused,
    Want,
    quorum_id_of,
)

SETTINGS = {"mode": "exact", "state layout": "abc"}


class Wire:
    """One connection of a rank, as far as the group sees it."""

    def __init__(self):
        self.sent, self.is_closed = [], False

    def send(self, payload):
        self.sent.append(pb.ToRank.FromString(payload))

    def close(self):
        self.is_closed = True

    def kinds(self):
        return [message.WhichOneof("kind") for message in self.sent]

    def last(self, kind):
        found = [m for m in self.sent if m.WhichOneof("kind") == kind]
        return getattr(found[-1], kind) if found else None


class Rank:
    def __init__(self, group, rank, **hello):
        self.group, self.asks, self.pushes = group, Wire(), Wire()
        facts = {"rank": rank, "pid": 100 + rank, "token": "secret", "settings": SETTINGS}
        for is_push, wire in ((False, self.asks), (True, self.pushes)):
            self.say(wire, hello=pb.RankHello(**{**facts, "is_push": is_push, **hello}))

    def say(self, wire=None, **message):
        self.group.received(wire or self.asks, pb.FromRank(**message).SerializeToString())

    def ready(self, until=10):
        self.say(ready=pb.Ready(until=until))

    def vote(self, step, reason=""):
        self.say(vote=pb.Vote(step=step, is_ok=not reason, reason=reason, until=10))


def make_group(ranks=2, **config):
    config = {"failed_steps_max": 3, **config}
    return Group(
        Config(
            job="job",
            replica_id="r0",
            incarnation=1,
            ranks=ranks,
            endpoints=("h:1",),
            token="secret",
            **config,
        )
    )


def quorum(number=1, *, from_step=0, names=("r0", "r1")):
    members = tuple(Member(replica_id=name, incarnation=1) for name in names)
    return Quorum(
        quorum_id=quorum_id_of(1, number),
        from_step=from_step,
        members=members,
        healing=frozenset(),
    )


@pytest.fixture
def group():
    return make_group()


@pytest.fixture
def ranks(group):
    """Two ranks that run step 0."""
    ranks = [Rank(group, 0), Rank(group, 1)]
    for rank in ranks:
        rank.ready()
    group.order(NewQuorum(quorum=quorum()))
    return ranks


def test_no_step_starts_before_all_ranks_are_ready(group):
    first, second = Rank(group, 0), Rank(group, 1)
    group.order(NewQuorum(quorum=quorum()))
    first.ready()
    assert first.asks.last("go") is None
    second.ready()
    assert first.asks.last("go").step == second.asks.last("go").step == 0


def test_a_step_is_committed_when_all_ranks_say_yes(ranks):
    ranks[0].vote(0)
    assert ranks[0].asks.last("decision") is None
    ranks[1].vote(0)
    assert all(rank.asks.last("decision").is_committed for rank in ranks)


def test_one_no_repeats_the_step_and_every_rank_is_told_the_same_reason(group, ranks):
    ranks[0].vote(0)
    ranks[1].vote(0, "loss is nan")
    assert {rank.asks.last("decision").reason for rank in ranks} == {"rank 1: loss is nan"}
    assert group.core.committed == 0


def test_the_ranks_are_told_the_next_step_with_the_decision(ranks):
    for rank in ranks:
        rank.vote(0)
    assert ranks[0].asks.last("decision").go.step == 1


def test_a_failure_that_repeats_stops_the_group_with_its_reason(group, ranks):
    for number in range(3):
        ranks[0].vote(0, "loss is nan")
        ranks[1].vote(0)
        group.order(NewQuorum(quorum=quorum(number + 2)))
        for rank in ranks:
            rank.ready()
    stop = ranks[1].pushes.last("stop")
    assert "3 steps failed one after the other" in stop.what and "loss is nan" in stop.what


def test_a_dead_rank_ends_the_group_and_the_others_are_told_why(group, ranks):
    group.rank_died(101)
    assert group.ended.is_set() and group.core.want is Want.GONE
    assert "rank 1 (pid 101) died" in ranks[0].pushes.last("stop").what


def test_a_rank_on_another_machine_is_dead_when_its_connection_closes(group, ranks):
    group.closed(ranks[1].asks)
    assert "rank 1 (pid 101) closed its connection" in ranks[0].pushes.last("stop").what


def test_a_rank_that_has_said_goodbye_may_close_its_connection(group, ranks):
    ranks[1].say(bye=pb.Bye(reason="finished"))
    group.closed(ranks[1].asks)
    group.rank_died(101)
    assert not group.ended.is_set()
    ranks[0].say(bye=pb.Bye(reason="finished"))
    assert group.ended.is_set() and group.last_reason == "finished"


def test_a_lost_member_aborts_the_running_step(ranks, group):
    lost = LostMember(quorum_id=quorum_id_of(1, 1), replica_id="r1", incarnation=1, reason="died")
    group.order(lost)
    assert ranks[0].pushes.last("abort").reason == "r1 died"


def test_a_gentle_change_aborts_nothing(ranks, group):
    group.order(Prepare(change_id=quorum_id_of(1, 2), is_broken=False, must_abort=False))
    assert "abort" not in ranks[0].pushes.kinds()


def test_a_drained_group_runs_to_the_step_that_others_go_on_from_and_is_stopped_cleanly(
    ranks, group
):
    group.order(Drain(reason="for an upgrade"))
    group.order(Prepare(change_id=quorum_id_of(1, 2), is_broken=False, must_abort=False))
    group.order(NewQuorum(quorum=quorum(2, from_step=2, names=("r1",))))
    for step in (0, 1):
        assert not group.ended.is_set()
        for rank in ranks:
            rank.vote(step)
    stop = ranks[0].pushes.last("stop")
    assert stop.is_clean and "for an upgrade" in stop.what


def test_a_refusal_reaches_every_rank_with_its_remedy(ranks, group):
    group.order(Refused(what="shards is 4 here", remedy="Start all alike.", compare_with=""))
    assert [rank.pushes.last("stop").remedy for rank in ranks] == ["Start all alike."] * 2


def test_a_notice_is_passed_on(ranks, group):
    group.order(Notice(text="waiting for r1"))
    assert ranks[1].pushes.last("notice").text == "waiting for r1"


def test_a_rank_with_other_settings_than_rank_0_is_refused(group):
    Rank(group, 0)
    other = Rank(group, 1, settings={**SETTINGS, "mode": "fast"})
    assert "rank 1 has other settings" in other.asks.last("stop").what


def test_a_stranger_without_the_token_is_cut_off(group):
    stranger = Rank(group, 0, token="guess")
    assert stranger.asks.is_closed and not group.ranks


def test_who_has_not_said_hello_is_not_listened_to(group):
    wire = Wire()
    group.received(wire, pb.FromRank(vote=pb.Vote(step=0, is_ok=True)).SerializeToString())
    assert wire.is_closed


def test_a_rank_alone_may_run_ahead_of_the_answer_to_its_vote():
    group = make_group(ranks=1)
    only = Rank(group, 0)
    only.ready()
    group.order(NewQuorum(quorum=quorum()))
    assert only.asks.last("go").may_run == 1
