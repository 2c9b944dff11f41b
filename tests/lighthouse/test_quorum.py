import itertools
import random
from dataclasses import replace
from math import inf

import pytest

from ftcore.wire.messages import Member, Quorum, Report, Want
from lighthouse.quorum import (
    Change,
    GiveUp,
    Hold,
    Policy,
    Seat,
    StartChange,
    View,
    Waiting,
    decide,
    living_members,
)

POLICY = Policy(replicas_min=2, join_timeout_s=10, promise_timeout_s=60)


def member(name):
    return Member(replica_id=name, incarnation=1)


def seat(name, **facts):
    report = Report(member=member(name), number=1, quorum_id=5, **facts)
    asked_at = 0.0 if report.want is Want.SEAT else inf
    return Seat(report=report, heard_at=0.0, asked_at=asked_at)


def quorum(*names, **facts):
    members = tuple(member(name) for name in names)
    return Quorum(quorum_id=5, members=members, **{"from_step": 0, **facts})


def view(*seats, **facts):
    return View(seats={s.replica_id: s for s in seats}, last_id=5, **facts)


def asking(name, **facts):
    return seat(name, want=Want.SEAT, **facts)


def broken(**facts):
    return Change(change_id=6, is_broken=True, must_abort=False, since=0.0, **facts)


GENTLE = Change(change_id=6, is_broken=False, must_abort=False, since=0.0)


def test_the_first_quorum_starts_when_everyone_asked():
    answer = decide(view(asking("a"), asking("b")), POLICY, 0.0)
    assert answer.replica_ids == ("a", "b") and answer.quorum_id == 6


def test_at_the_start_all_copy_one_groups_weights():
    assert decide(view(asking("a"), asking("b")), POLICY, 0.0).healing == {"b"}


def test_the_newest_state_is_the_one_that_others_copy():
    answer = decide(view(asking("a"), asking("b", committed=7, lineage=3)), POLICY, 0.0)
    assert (answer.from_step, answer.healing) == (7, {"a"})


def test_too_few_groups_wait():
    assert decide(view(asking("a")), POLICY, 0.0).hold is Hold.TOO_FEW


def test_a_straggler_is_waited_for_until_the_join_timeout():
    groups = view(asking("a"), asking("b"), seat("c"))
    assert decide(groups, POLICY, 1.0) == Waiting(hold=Hold.STRAGGLERS, until=10.0, whom=("c",))
    assert decide(groups, POLICY, 10.0).replica_ids == ("a", "b")


def test_a_minority_never_begins():
    groups = view(asking("a"), asking("b"), seat("c"), seat("d"))
    assert decide(groups, POLICY, 99.0).hold is Hold.NO_MAJORITY


def test_a_standing_quorum_needs_no_answer():
    groups = view(seat("a"), seat("b"), standing=quorum("a", "b"))
    assert decide(groups, POLICY, 99.0) == Waiting(hold=Hold.STANDING)


def test_a_joiner_starts_a_gentle_change():
    groups = view(seat("a"), seat("b"), asking("c"), standing=quorum("a", "b"))
    assert decide(groups, POLICY, 0.0) == StartChange(is_broken=False, reason="c joins")


def test_a_gentle_change_takes_hold_at_the_first_step_nobody_can_have_begun():
    a, b = (seat(n, promised=6, limit=limit) for n, limit in (("a", 8), ("b", 9)))
    groups = view(a, b, asking("c"), standing=quorum("a", "b"), change=GENTLE)
    answer = decide(groups, POLICY, 0.0)
    assert (answer.from_step, answer.healing, answer.quorum_id) == (10, {"c"}, 6)


def test_nothing_is_issued_before_every_member_promised():
    a, b = seat("a", promised=6, limit=8), seat("b")
    groups = view(a, b, asking("c"), standing=quorum("a", "b"), change=GENTLE)
    assert decide(groups, POLICY, 0.0) == Waiting(hold=Hold.PROMISES, until=60.0, whom=("b",))
    assert decide(groups, POLICY, 60.0) == GiveUp(replica_ids=("b",))


def test_a_promise_of_a_member_that_does_not_know_the_quorum_does_not_count():
    a = seat("a", promised=6, limit=8)
    late = replace(a, report=replace(a.report, quorum_id=4))
    groups = view(late, seat("b", promised=6), standing=quorum("a", "b"), change=GENTLE)
    assert decide(groups, POLICY, 0.0).whom == ("a",)


def test_a_lost_member_breaks_the_quorum():
    groups = view(seat("a"), seat("b"), standing=quorum("a", "b", "c"), lost=frozenset({("c", 1)}))
    assert decide(groups, POLICY, 0.0) == StartChange(is_broken=True, reason="a member is lost")


def test_after_a_loss_whoever_is_behind_heals():
    a, b = (seat(n, promised=6, committed=c) for n, c in (("a", 8), ("b", 7)))
    standing, lost = quorum("a", "b", "c"), frozenset({("c", 1)})
    answer = decide(view(a, b, standing=standing, lost=lost, change=broken()), POLICY, 0.0)
    assert (answer.from_step, answer.healing) == (8, {"b"})


def test_a_torn_state_is_never_a_source():
    a = seat("a", promised=6, committed=9, is_valid=False)
    b = seat("b", promised=6, committed=7)
    answer = decide(view(a, b, standing=quorum("a", "b"), change=broken()), POLICY, 0.0)
    assert (answer.from_step, answer.healing) == (7, {"a"})


def test_without_a_whole_state_nobody_goes_on():
    a, b = (seat(n, promised=6, is_valid=False) for n in "ab")
    answer = decide(view(a, b, standing=quorum("a", "b"), change=broken()), POLICY, 0.0)
    assert answer.hold is Hold.NO_STATE


def test_a_newer_state_that_is_out_of_sight_is_waited_for():
    torn, fresh = seat("a", promised=6, is_valid=False), asking("c")
    standing, gone = quorum("a", "b"), frozenset({("b", 1)})
    seen = {"standing": standing, "lost": gone, "change": broken()}
    waits = decide(view(torn, fresh, unsure=gone, **seen), POLICY, 0.0)
    assert (waits.hold, waits.whom) == (Hold.STATE_AWAY, ("b",))
    back = seat("b", committed=9)  # it is there again, but has not asked yet
    waits = decide(view(torn, fresh, back, **seen), POLICY, 0.0)
    assert (waits.hold, waits.whom) == (Hold.STATE_AWAY, ("b",))
    goes_on = decide(view(torn, fresh, **seen), POLICY, 0.0)  # b is known to be dead
    assert (goes_on.from_step, goes_on.healing) == (0, {"a"})


def test_members_out_of_sight_are_not_replaced_by_guess():
    standing, gone = quorum("a", "b"), frozenset({("a", 1), ("b", 1)})
    newcomers = (asking("c"), asking("d"))
    assert decide(
        view(*newcomers, standing=standing, lost=gone, unsure=gone), POLICY, 99.0
    ).hold is (Hold.ORPHANS)
    assert decide(view(*newcomers, standing=standing, lost=gone), POLICY, 99.0).replica_ids == (
        ("c", "d")
    )


def test_the_last_state_is_copied_before_its_holder_leaves():
    a = seat("a", want=Want.LEAVE, promised=6, limit=4)
    policy = Policy(replicas_min=1)
    answer = decide(view(a, asking("b"), standing=quorum("a"), change=GENTLE), policy, 0.0)
    assert (answer.replica_ids, answer.healing) == (("a", "b"), {"b"})


def test_when_all_leave_the_quorum_ends_empty():
    a, b = (seat(n, want=Want.LEAVE, promised=6, limit=4) for n in "ab")
    answer = decide(view(a, b, standing=quorum("a", "b"), change=GENTLE), POLICY, 0.0)
    assert (answer.members, answer.from_step) == ((), 5)


def test_a_new_lighthouse_first_learns():
    groups = view(asking("c"), standing=quorum("a", "b"), learn_until=2.0)
    assert decide(groups, POLICY, 1.0) == Waiting(hold=Hold.LEARNING, until=2.0)


def random_view(rng):
    names = [f"r{i}" for i in range(rng.randint(0, 6))]
    standing = quorum(*sorted(rng.sample(names, rng.randint(0, len(names))))) if names else None
    seats = [
        seat(
            name,
            want=rng.choice(list(Want)[:3]),
            committed=rng.randint(0, 3),
            is_valid=rng.random() < 0.8,
            promised=rng.choice([0, 6]),
            limit=rng.randint(0, 5),
            failed_id=rng.choice([0, 0, 0, 5]),
        )
        for name in names
        if rng.random() < 0.8
    ]
    lives = sorted(standing.lives) if standing else []
    lost = frozenset(life for life in lives if rng.random() < 0.3)
    return view(
        *seats,
        standing=standing,
        lost=lost,
        unsure=frozenset(life for life in lost if rng.random() < 0.5),
        change=rng.choice([None, GENTLE, broken()]),
        learn_until=rng.choice([-inf, 5.0]),
    )


@pytest.mark.parametrize("block", range(10))
def test_whatever_the_view_the_answer_keeps_the_rules(block):
    for seed in range(block * 300, block * 300 + 300):
        rng = random.Random(seed)
        groups, now = random_view(rng), rng.uniform(0, 80)
        answer = decide(groups, POLICY, now)
        shuffled = dict(rng.sample(list(groups.seats.items()), len(groups.seats)))
        assert decide(replace(groups, seats=shuffled), POLICY, now) == answer
        if isinstance(answer, Waiting):
            later = rng.uniform(now, min(answer.until, now + 200))
            assert decide(groups, POLICY, later) == answer or later >= answer.until
        if isinstance(answer, Quorum) and answer.members:
            check_quorum(groups, answer)


def check_quorum(groups, answer):
    members = living_members(groups)
    assert len(answer.members) >= POLICY.replicas_min and answer.sources
    assert set(answer.replica_ids) <= set(groups.seats)
    assert not answer.lives & groups.unsure, "it may still be training in the old quorum"
    assert all(s.report.promised == answer.quorum_id for s in members)
    if groups.change is None or groups.change.is_broken or not members:
        sources = [groups.seats[m.replica_id].report for m in answer.sources]
        assert all(r.is_valid and r.committed == answer.from_step for r in sources)


def test_every_state_of_three_groups():
    """No sampling: what each of three groups may be doing, under each standing quorum."""
    kinds = ("absent", "training", "asking", "leaving", "failed")
    made = {
        "training": seat,
        "asking": asking,
        "leaving": lambda n: seat(n, want=Want.LEAVE),
        "failed": lambda n: seat(n, failed_id=5),
    }
    for mix in itertools.product(kinds, repeat=3):
        group = dict(zip("abc", mix, strict=True))
        seats = [made[kind](name) for name, kind in group.items() if kind != "absent"]
        for size in range(4):
            for names in itertools.combinations("abc", size):
                standing = quorum(*names) if names else None
                answer = decide(view(*seats, standing=standing), POLICY, 99.0)
                members = [n for n in names if group[n] != "absent"]
                if any(group[n] == "failed" for n in members):
                    assert answer.is_broken and answer.must_abort
                elif isinstance(answer, Quorum):
                    assert not members
                    assert all(group[n] == "asking" for n in answer.replica_ids)
