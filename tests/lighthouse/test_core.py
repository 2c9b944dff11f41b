"""One job without its network: what each message leads to. Read it beside lighthouse/core.py."""

from dataclasses import replace

from ftcore.control.member import MemberCore
from ftcore.wire.messages import (
    Drain,
    Hello,
    LostMember,
    Member,
    NewQuorum,
    Prepare,
    Quorum,
    Refused,
    Report,
    Want,
)
from lighthouse.core import JobCore
from lighthouse.quorum import Hold, Policy

POLICY = Policy(replicas_min=2, heartbeat_timeout_s=2.0, reattach_timeout_s=0.5)


class Job:
    """A core, and what it last told each group. `now` moves only when a story says so."""

    def __init__(self, policy=POLICY, **more):
        self.core = JobCore("job", policy, first_id=1, now=0.0, **{"must_learn": False, **more})
        self.now, self.reports, self.told, self.records, self.facts = 0.0, {}, {}, [], []

    def hello(self, name, incarnation=1, *, standing=None, settings=None, **facts):
        member = Member(replica_id=name, incarnation=incarnation)
        report = self.reports[name] = Report(member=member, number=1, **facts)
        hello = Hello(job="job", report=report, standing=standing, settings=settings or {})
        self.take(self.core.hello(hello, self.now))

    def say(self, name, **changes):
        report = self.reports[name]
        report = self.reports[name] = replace(report, number=report.number + 1, **changes)
        self.take(self.core.report(report, self.now))

    def later(self, seconds):
        self.now += seconds
        self.take(self.core.poll(self.now))

    def take(self, turn):
        self.decision = turn.decision
        self.records += turn.records
        self.facts += turn.facts
        for (name, _), order in turn.orders:
            self.told.setdefault(name, []).append(order)

    def last(self, name):
        return self.told[name][-1]

    def kinds(self, name):
        return [type(order) for order in self.told.get(name, ())]


def training(*names, **more):
    """A job whose groups have taken their first quorum."""
    job = Job(**more)
    for name in names:
        job.hello(name)
    for name in names:
        job.say(name, want=Want.SEAT)
    for name in names:
        job.say(name, want=Want.NOTHING, quorum_id=job.core.standing.quorum_id)
    job.told.clear()
    return job


def test_the_first_quorum_is_recorded_and_told_to_its_members():
    job = Job()
    job.hello("a", want=Want.SEAT)
    assert not job.told and job.decision.hold is Hold.TOO_FEW
    job.hello("b", want=Want.SEAT)
    (record,) = job.records
    assert record.quorum.replica_ids == ("a", "b")
    assert job.last("a") == job.last("b") == NewQuorum(quorum=record.quorum)


def test_an_ask_that_is_repeated_gets_the_same_quorum_again_and_no_second_seat():
    job = Job()
    for name in "ab":
        job.hello(name, want=Want.SEAT)
    job.say("a")  # the answer was lost
    assert job.kinds("a") == [NewQuorum, NewQuorum] and len(job.records) == 1


def test_a_heartbeat_of_a_group_that_trains_is_answered_by_nothing():
    job = training("a", "b")
    job.say("a", committed=5, lineage=1)
    assert not job.told and not job.core.standing.healing - {"b"}


def test_a_report_older_than_the_newest_is_ignored():
    job = training("a", "b")
    late = replace(job.reports["a"], number=1, want=Want.GONE)
    job.take(job.core.report(late, job.now))
    assert "a" in job.core.seats and not job.told


def test_a_joiner_makes_every_member_promise_and_comes_in_at_the_boundary():
    job = training("a", "b")
    job.hello("c", want=Want.SEAT)
    assert job.last("a") == job.last("b") == Prepare(change_id=2, is_broken=False)
    job.say("a", promised=2, limit=7)
    assert job.kinds("c") == []
    job.say("b", promised=2, limit=8)
    quorum = job.last("c").quorum
    assert (quorum.replica_ids, quorum.from_step, quorum.healing) == (("a", "b", "c"), 9, {"c"})


def test_a_prepare_that_was_lost_is_repeated_at_the_next_report():
    job = training("a", "b")
    job.hello("c", want=Want.SEAT)
    job.say("a")
    assert job.kinds("a") == [Prepare, Prepare]


def test_a_group_that_says_it_is_gone_is_left_out_at_once():
    job = training("a", "b", "c")
    job.say("c", want=Want.GONE, reason="rank 0 died")
    lost, prepare = job.told["a"]
    assert (lost.replica_id, lost.reason) == ("c", "rank 0 died")
    assert prepare == Prepare(change_id=2, is_broken=True)


def test_losses_of_one_moment_are_one_message():
    job = training(*"abcdef")
    job.now = 3.0  # nobody was heard for longer than heartbeat_timeout_s
    for name in "ab":
        job.core.seats[name] = replace(job.core.seats[name], heard_at=3.0)
    job.later(0.0)
    (lost,) = [order for order in job.told["a"] if isinstance(order, LostMember)]
    assert {name for name, _ in lost.lives} == set("cdef")


def test_a_member_that_is_lost_together_with_others_lets_go():
    quorum = Quorum(
        quorum_id=5,
        from_step=0,
        members=tuple(Member(replica_id=n, incarnation=1) for n in "abc"),
    )
    core = MemberCore(quorum.members[2])
    core.new_quorum(quorum)
    core.try_start()
    lost = LostMember(
        quorum_id=5, replica_id="b", incarnation=1, reason="silence", others=(("c", 1),)
    )
    assert core.lost_member(lost) and core.quorum is None


def test_a_closed_stream_has_a_moment_to_come_back():
    job = training("a", "b", "c")
    job.take(job.core.closed(("c", 1), job.now))
    job.later(0.4)
    assert not job.told
    job.later(0.2)
    assert job.told["a"][0].reason == "closed its stream and did not come back"


def test_a_restarted_group_replaces_its_dead_self():
    job = training("a", "b", "c")
    job.take(job.core.closed(("c", 1), job.now))
    job.hello("c", 2, want=Want.SEAT)
    assert job.told["a"][0].reason == "was restarted"
    assert job.core.seats["c"].report.member.incarnation == 2


def test_a_second_living_group_of_the_same_name_is_refused():
    job = training("a", "b")
    first = job.reports["a"]
    job.hello("a", 2, want=Want.SEAT)
    job.reports["a"] = first
    job.later(0.6)
    job.say("a")
    assert isinstance(job.last("a"), Refused) and "in use by another" in job.last("a").what
    assert job.core.seats["a"].report.member.incarnation == 1


def test_last_words_read_after_the_new_lifes_hello_do_not_refuse_the_new_life():
    job = training("a", "b")
    first = job.reports["a"]
    job.hello("a", 2, want=Want.SEAT)
    job.reports["a"] = first  # a lighthouse that was paused reads what the old life had sent
    job.say("a", committed=9)
    job.say("a", want=Want.GONE, reason="killed")
    assert Refused not in job.kinds("a")
    assert job.core.seats["a"].report.member.incarnation == 2


def test_groups_with_different_settings_are_refused_by_the_first_difference():
    job = Job()
    job.hello("a", settings={"seed": "1", "shards": "8"})
    job.hello("b", settings={"seed": "2", "shards": "8"})
    assert job.last("b").what == "seed is 2 here and 1 in the other replica groups"


def test_a_drained_group_is_told_to_leave_and_leaves_at_the_boundary():
    job = training("a", "b", "c")
    job.take(job.core.drain("c", "maintenance", job.now))
    assert job.last("c") == Drain(reason="maintenance")
    job.say("c", want=Want.LEAVE)
    for name in "abc":
        job.say(name, promised=2, limit=4)
    assert job.last("a").quorum.replica_ids == ("a", "b")
    assert job.last("c") == job.last("a"), "it has to know from which step it is out"


def test_an_evicted_group_is_lost_even_if_it_is_still_heard():
    job = training("a", "b", "c")
    job.take(job.core.evict("c", "its host burns", job.now))
    assert job.told["a"][0].reason == "evicted: its host burns"
    assert isinstance(job.last("c"), LostMember)


def test_a_new_lighthouse_adopts_the_quorum_that_a_member_stands_in():
    standing = training("a", "b").core.standing
    job = Job(must_learn=True)
    job.hello("a", standing=standing, quorum_id=1)
    assert job.core.standing == standing and job.decision.hold is Hold.LEARNING
    job.hello("b", standing=standing, quorum_id=1)
    assert job.decision.hold is Hold.STANDING and not job.records


def test_a_member_that_never_comes_back_to_a_new_lighthouse_is_lost_when_it_has_learned():
    standing = training("a", "b", "c").core.standing
    job = Job(must_learn=True)
    for name in "ab":
        job.hello(name, standing=standing, quorum_id=1)
    job.now = 1.9
    for name in "ab":
        job.say(name)
    assert not job.told
    job.later(0.2)
    assert job.told["a"][0].reason == "was never seen again"


def test_ids_go_on_above_everything_that_was_ever_seen():
    job = Job(must_learn=True)
    job.hello("a", want=Want.SEAT, promised=41, quorum_id=7)
    job.hello("b", want=Want.SEAT)
    job.later(2.0)
    for name in "ab":
        job.say(name)
    job.later(POLICY.join_timeout_s)
    assert job.core.last_id >= 41


def test_what_is_deferred_costs_one_decision_for_many_messages():
    job = Job(Policy(replicas_min=3))
    job.core.defers = True
    for name in "abc":
        job.hello(name, want=Want.SEAT)
        assert job.decision is None
    job.later(0.0)
    assert job.records[0].quorum.replica_ids == ("a", "b", "c")
