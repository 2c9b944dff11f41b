"""Stories of one job's books: what an interruption costs, and that no second is counted twice."""

import random
from dataclasses import replace
from math import inf

import pytest

from ftcore.wire.messages import Member, Quorum, Report, Want
from lighthouse.core import Fact
from lighthouse.goodput import RECORDS_MAX, Cause, Goodput, summary


def member(name, *, ranks=2):
    addresses = tuple(f"{name}:{rank}" for rank in range(ranks))
    return Member(replica_id=name, incarnation=1, heal_addresses=addresses)


def quorum(number, *names, step=0, healing=()):
    members = tuple(member(n) for n in names)
    return Quorum(quorum_id=number, from_step=step, members=members, healing=frozenset(healing))


def report(name, quorum_id=0, committed=0, **more):
    more.setdefault("lineage", quorum_id if committed else 0)
    return Report(member=member(name), number=1, quorum_id=quorum_id, committed=committed, **more)


def fact(at, what, about="quorum", detail=""):
    return Fact(at=at, what=what, about=about, detail=detail)


def started(*names, at=0.0, first_step_s=1.0):
    """A job whose first step is committed `first_step_s` after its first group came."""
    book = Goodput()
    book.hello(report(names[0]), None, at)
    book.told(fact(at, "quorum.issued"), quorum(1, *names))
    commits(book, 1, 1, *names, at=at + first_step_s)
    return book


def commits(book, quorum_id, committed, *names, at, **times):
    """All members report that they committed under this quorum."""
    for name in names:
        book.heard(report(name, quorum_id, committed, **times), at)


def test_the_start_counts_as_time_in_which_nothing_was_computed():
    book = started("a", "b", first_step_s=1.0)
    assert book.records[-1].cause is Cause.START
    assert book.ettr(10.0) == pytest.approx(0.9)


def test_a_lost_member_costs_from_its_last_sign_of_life_to_the_next_new_step():
    book = started("a", "b")
    book.told(fact(10.5, "member.lost", "b", "closed its stream"), None, heard_at=10.0)
    book.told(fact(10.6, "quorum.issued"), quorum(2, "a", step=1))
    commits(book, 2, 2, "a", at=11.0, group_s=0.1)
    record = book.records[-1]
    assert (record.cause, record.who, record.quorum_id) == (Cause.LOST, ("b",), 2)
    assert record.stopped_s == pytest.approx(1.0) == record.phases.total_s
    assert record.phases.noticed_s == pytest.approx(0.5)
    assert record.phases.group_s == pytest.approx(0.1)
    assert record.lost_rank_s == pytest.approx(1.0 * 4)


def test_while_a_group_is_away_its_ranks_are_missing():
    book = started("a", "b")
    book.told(fact(10.0, "member.lost", "b", "died"), None, heard_at=10.0)
    book.told(fact(10.0, "quorum.issued"), quorum(2, "a", step=1))
    book.heard(report("a", 2, 2), 11.0)
    seconds = book.settle(21.0)
    assert seconds.rank_missing == pytest.approx(10 * 2)
    assert seconds.rank_training == pytest.approx(9 * 4 + 10 * 2)


def test_a_step_that_failed_is_repeated_once_however_many_groups_say_so():
    book = started("a", "b", "c")
    for name in "ac":
        book.told(fact(5.0, "change.started", detail=f"a step failed on {name}: aborted"), None)
        book.heard(report(name, 1, 1, failed_id=1), 5.0)
    book.told(fact(5.1, "member.lost", "b", "died"), None, heard_at=4.9)
    book.told(fact(5.2, "quorum.issued"), quorum(2, "a", "c", step=1))
    commits(book, 2, 2, "a", "c", at=5.5)
    record = book.records[-1]
    assert (record.cause, record.who, record.reason) == (Cause.LOST, ("b",), "died")
    assert book.steps_repeated == record.steps_repeated == 1


def test_going_back_to_a_checkpoint_ends_with_the_first_step_that_is_new():
    book = started("a")
    book.heard(report("a", 1, 100), 50.0)
    book.told(fact(60.0, "member.lost", "a", "died"), None, heard_at=60.0)
    book.told(fact(70.0, "quorum.issued"), quorum(2, "a", step=80))
    book.heard(report("a", 2, 90), 80.0)
    assert book.open is not None
    book.heard(report("a", 2, 101), 90.0)
    record = book.records[-1]
    assert record.steps_repeated == 20
    assert record.stopped_s == pytest.approx(30.0)
    assert book.steps_committed == 101


def test_a_planned_join_costs_what_the_ranks_measured():
    book = started("a", "b")
    book.told(fact(10.0, "change.started", detail="c joins"), None)
    book.told(fact(10.5, "quorum.issued"), quorum(2, "a", "b", "c", step=3, healing="c"))
    commits(book, 2, 4, "a", "b", "c", at=12.0, group_s=0.2)
    record = book.records[-1]
    assert (record.cause, record.who) == (Cause.JOINED, ("c",))
    assert record.stopped_s == pytest.approx(0.2)
    assert book.ettr(101.0) == pytest.approx((101 - 1.2) / 101)


def test_a_loss_in_the_middle_of_a_planned_change_is_a_loss():
    book = started("a", "b")
    book.told(fact(10.0, "change.started", detail="c joins"), None)
    book.told(fact(10.2, "member.lost", "b", "died"), None, heard_at=10.1)
    book.told(fact(10.3, "quorum.issued"), quorum(2, "a", "c", step=1))
    commits(book, 2, 2, "a", "c", at=11.1)
    assert [r.cause for r in book.records] == [Cause.START, Cause.LOST]
    assert book.records[-1].stopped_s == pytest.approx(1.0)


def test_a_finished_job_loses_nothing_more():
    book = started("a", "b")
    book.told(fact(11.0, "member.lost", "a", "finished"), None, heard_at=11.0)
    book.told(fact(11.1, "member.lost", "b", "finished"), None, heard_at=11.1)
    assert book.ettr(10_000.0) == book.ettr(11.0) == pytest.approx(10 / 11)
    assert [r.cause for r in book.records] == [Cause.START]


def test_a_new_lighthouse_that_meets_a_training_job_counts_no_start():
    book = Goodput()
    book.hello(report("a", 7, 50), quorum(7, "a", "b"), 0.0)
    assert book.ettr(10.0) == 1.0 and not book.records


def test_the_books_are_bounded():
    book = started("a", "b")
    for i in range(RECORDS_MAX + 50):
        book.told(fact(10.0 + i, "member.lost", "b", "died"), None, heard_at=10.0 + i)
        book.told(fact(10.1 + i, "quorum.issued"), quorum(i + 2, "a", "b", step=i + 1))
        commits(book, i + 2, i + 2, "a", "b", at=10.2 + i)
    assert len(book.records) == RECORDS_MAX
    assert book.counts[Cause.LOST] == RECORDS_MAX + 50


def test_a_record_is_plain_json():
    record = started("a", "b").records[-1].to_json(wall_offset_s=1000.0)
    assert record["began_unix_s"] == 1000.0
    assert record["cause"] == "start" and record["members"] == ["a", "b"]
    assert record["phases"]["first_step_s"] == 1.0


def test_the_summary_says_what_a_person_wants_to_know():
    found = summary(started("a", "b"), 10.0)
    phases = found.pop("last_recovery")
    assert phases.pop("first_step") == 1.0 and not any(phases.values())
    assert found == {
        "goodput": 0.9,
        "trained_s": 9.0,
        "stopped_s": 1.0,
        "interruptions": 1,
        "lost_rank_s": 4.0,
        "steps_committed": 1,
        "steps_repeated": 0,
    }


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_totals_only_grow_and_add_up(seed):
    rng, book = random.Random(seed), Goodput()
    names, number, now = ["a", "b", "c"], 1, 0.0
    book.hello(report("a"), None, now)
    before = book.settle(now)
    totals = (before.training, before.stopped, before.rank_missing, before.rank_stopped)
    for _ in range(100):
        now += rng.expovariate(1.0)
        who = rng.choice(names)
        match rng.randrange(5):
            case 0:
                heard_at = now - rng.random() * 3
                book.told(fact(now, "member.lost", who, "died"), None, heard_at=heard_at)
            case 1:
                detail = rng.choice(
                    [f"{who} joins", "a member leaves", f"a step failed on {who}: x"]
                )
                book.told(fact(now, "change.started", detail=detail), None)
            case 2:
                number += 1
                some = rng.sample(names, rng.randint(1, 3))
                step = rng.randint(0, number)
                book.told(fact(now, "quorum.issued"), quorum(number, *some, step=step))
            case _:
                times = {"group_s": rng.random(), "heal_s": rng.random() * rng.randrange(2)}
                book.heard(report(who, number, rng.randint(0, number + 2), **times), now)
        seconds = replace(book.settle(now))
        new = (seconds.training, seconds.stopped, seconds.rank_missing, seconds.rank_stopped)
        assert all(b >= a for a, b in zip(totals, new, strict=True)), f"seed {seed}"
        assert seconds.training + seconds.stopped - book._debt_s == pytest.approx(now, abs=1e-6)
        totals = new
    for record in book.records:
        assert all(v >= 0 for v in (record.stopped_s, record.phases.total_s)), f"seed {seed}"
        assert record.phases.first_step_s < inf


def test_a_report_with_want_gone_does_not_start_the_clock():
    book = Goodput()
    book.hello(report("a", want=Want.GONE), None, 5.0)
    assert book.ettr(10.0) == 0.0


def test_a_survivor_whose_step_failed_is_not_to_blame():
    book = started("a", "b")
    book.told(fact(5.0, "member.lost", "b", "died"), None, heard_at=5.0)
    book.told(fact(5.1, "change.started", detail="a step failed on a: cut"), None)
    assert book.open.who == ("b",) and book.open.cause is Cause.LOST


def test_the_times_of_a_healer_count_although_another_reports_first():
    book = started("a")
    book.told(fact(10.0, "change.started", detail="b joins"), None)
    book.told(fact(10.1, "quorum.issued"), quorum(2, "a", "b", step=2, healing="b"))
    assert book.heard(report("a", 2, 3, group_s=0.1), 12.0) is None
    ended = book.heard(report("b", 2, 3, group_s=0.2, heal_s=0.5), 12.4)
    assert ended is book.records[-1]
    assert (ended.phases.group_s, ended.phases.heal_s) == (0.2, 0.5)


def test_a_join_costs_what_it_held_the_others_and_not_what_the_heal_took():
    book = started("a")
    book.told(fact(10.0, "change.started", detail="b joins"), None)
    book.told(fact(10.1, "quorum.issued"), quorum(2, "a", "b", step=2, healing="b"))
    book.heard(report("a", 2, 3, group_s=0.1, held_s=0.05), 14.0)
    ended = book.heard(report("b", 2, 3, group_s=0.1, heal_s=3.0), 14.1)
    assert ended.stopped_s == pytest.approx(0.15)
    assert ended.to_json(wall_offset_s=0.0)["held_s"] == 0.05


def test_times_of_the_quorum_before_do_not_count():
    book = started("a", "b")
    book.told(fact(10.0, "member.lost", "b", "died"), None, heard_at=10.0)
    book.told(fact(10.1, "quorum.issued"), quorum(2, "a", step=1))
    book.heard(report("a", 2, 1, lineage=1, group_s=9.0), 10.2)
    commits(book, 2, 2, "a", at=10.6, group_s=0.1)
    assert book.records[-1].phases.group_s == 0.1
    assert book.records[-1].phases.first_step_s == pytest.approx(0.4)


def test_new_trouble_ends_a_record_whose_members_were_not_all_heard():
    book = started("a", "b", "c")
    book.told(fact(10.0, "member.lost", "c", "died"), None, heard_at=10.0)
    book.told(fact(10.1, "quorum.issued"), quorum(2, "a", "b", step=1))
    book.heard(report("a", 2, 2), 10.5)
    ended = book.told(fact(11.0, "member.lost", "b", "died"), None, heard_at=10.9)
    assert ended.stopped_s == pytest.approx(0.5) and ended.who == ("c",)
    assert book.open.who == ("b",) and book.open.began_at == pytest.approx(10.9)
