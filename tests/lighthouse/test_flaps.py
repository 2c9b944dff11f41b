"""A group that keeps dying is held back, longer each time; nobody else waits for that."""

import pytest

from ftcore.wire.messages import Hello, Member, Report, Want, quorum_id_of
from lighthouse.core import JobCore
from lighthouse.flaps import Deaths, held_until
from lighthouse.quorum import Policy
from lighthouse.status import job_status

POLICY = Policy(
    deaths_max=2,
    deaths_window_s=100.0,
    hold_first_s=10.0,
    hold_most_s=35.0,
    heartbeat_timeout_s=1000.0,
)


def test_a_few_deaths_cost_nothing():
    assert held_until([1.0, 2.0], POLICY) < 0


@pytest.mark.parametrize(("deaths", "until"), [(3, 12.0), (4, 23.0), (5, 39.0), (60, 94.0)])
def test_each_more_holds_back_twice_as_long_up_to_the_limit(deaths, until):
    assert held_until([float(at) for at in range(deaths)], POLICY) == until


def test_zero_turns_it_off():
    assert held_until([1.0] * 50, Policy(deaths_max=0)) < 0


def test_old_deaths_are_forgotten():
    deaths = Deaths()
    for at in (0.0, 1.0, 200.0):
        deaths.note("a", POLICY, at)
    assert deaths.held(POLICY) == {}


class Job:
    def __init__(self, policy=POLICY):
        self.core = JobCore("job", policy, first_id=quorum_id_of(1, 1), now=0.0, must_learn=False)
        self.lives, self.numbers, self.now = {}, {}, 0.0

    def says(self, name, **facts):
        self.numbers[name] = self.numbers.get(name, 0) + 1
        member = Member(replica_id=name, incarnation=self.lives[name])
        report = Report(member=member, number=self.numbers[name], **facts)
        return self.core.report(report, self.now)

    def comes(self, name):
        self.lives[name] = self.lives.get(name, 0) + 1
        self.numbers[name] = 1
        member = Member(replica_id=name, incarnation=self.lives[name])
        report = Report(member=member, number=1, want=Want.SEAT)
        turn = self.core.hello(Hello(job="job", report=report), self.now)
        return self.settle() or turn

    def settle(self):
        """Members promise whatever is asked of them."""
        while change := self.core._change:
            standing = self.core.standing
            for name in standing.replica_ids:
                if name in self.core.seats:
                    facts = {"quorum_id": standing.quorum_id, "promised": change.change_id}
                    self.says(name, committed=1, lineage=1, **facts)

    def dies(self, name):
        self.says(name, want=Want.GONE, reason="rank 0 died")
        self.settle()

    @property
    def members(self):
        return self.core.standing.replica_ids

    def group(self, name):
        return job_status(self.core, None, self.now)["groups"][name]


def flapping(deaths):
    job = Job()
    job.comes("a")
    for count in range(deaths):
        job.now = float(count)
        job.comes("b")
        assert "b" in job.members or count > 2
        job.dies("b")
    return job


def test_who_died_too_often_waits_and_its_status_says_how_long():
    job = flapping(3)
    job.comes("b")
    assert job.members == ("a",)
    assert (job.group("b")["state"], job.group("b")["held_s"]) == ("held", 10.0)


def test_it_gets_in_when_its_time_is_over():
    job = flapping(3)
    turn = job.comes("b")
    assert turn.wake_at <= 12.0
    job.now = 12.0
    job.says("a", quorum_id=job.core.standing.quorum_id, committed=1, lineage=1)
    job.core.poll(job.now)
    job.settle()
    assert job.members == ("a", "b")


def test_another_group_is_not_delayed():
    job = flapping(3)
    job.comes("b")
    job.comes("c")
    assert job.members == ("a", "c")


def test_nobody_is_held_back_when_the_job_cannot_train_without_it():
    job = Job(Policy(deaths_max=1, hold_first_s=100.0, join_timeout_s=0.0))
    for _ in range(4):
        job.comes("a")
        assert job.members == ("a",)
        job.dies("a")


def test_the_last_words_of_a_group_that_may_not_join_are_shown_until_it_comes_back():
    job = Job()
    job.comes("a")
    job.lives["sick"] = 1
    turn = job.says("sick", want=Want.GONE, reason="health check disk: full")
    assert [(f.what, f.about, f.detail) for f in turn.facts] == [
        ("group.gone", "sick", "health check disk: full")
    ]
    gone = job_status(job.core, None, 3.0)["gone"]
    assert gone == {"sick": {"reason": "health check disk: full", "s_ago": 3.0}}
    job.comes("sick")
    assert job_status(job.core, None, 3.0)["gone"] == {}
