import itertools
import random

import pytest

from lighthouse.torchft_quorum import (
    Ask,
    Missing,
    NotYet,
    TorchftCore,
    TorchftMember,
    TorchftPolicy,
    TorchftQuorum,
    decide,
)

POLICY = TorchftPolicy(replicas_min=2, join_timeout_s=60, heartbeat_timeout_s=5)


def member(replica_id, **more):
    return TorchftMember(replica_id=replica_id, **more)


def core(previous="", *, term=1, number=4, policy=POLICY):
    members = tuple(member(r) for r in previous)
    before = TorchftQuorum(quorum_id=(1 << 32) + number, members=members) if previous else None
    return TorchftCore(policy, term=term, previous=before)


def ask(lighthouse, *replica_ids, now=0.0, **more):
    for replica_id in replica_ids:
        lighthouse.ask(member(replica_id, **more), now)
    return lighthouse.poll(now)


def test_when_all_living_groups_asked_there_is_a_quorum():
    assert ask(core(), "b", "a").replica_ids == ("a", "b")


def test_when_everyone_from_last_time_is_back_nobody_waits_for_a_newcomer():
    lighthouse = core("ab")
    lighthouse.heartbeat("c", 0)
    assert ask(lighthouse, "a", "b").replica_ids == ("a", "b")


def test_a_straggler_is_waited_for_until_the_join_timeout():
    lighthouse = core()
    lighthouse.heartbeat("c", 0)
    assert ask(lighthouse, "a", "b") is None
    assert lighthouse.waits_for(0).missing is Missing.STRAGGLERS
    for now in range(1, 61):
        lighthouse.heartbeat("a", now), lighthouse.heartbeat("b", now)
        lighthouse.heartbeat("c", now)
    assert lighthouse.poll(60).replica_ids == ("a", "b")


def test_a_dead_member_is_waited_for_until_its_heartbeat_runs_out():
    lighthouse = core("abc")
    for replica_id in "abc":
        lighthouse.heartbeat(replica_id, 0)
    assert ask(lighthouse, "a", "b", now=1) is None
    assert lighthouse.wake_at == 5
    assert lighthouse.poll(5).replica_ids == ("a", "b")


def test_half_of_the_living_groups_do_not_train_apart():
    lighthouse = core()
    for replica_id in "abcd":
        lighthouse.heartbeat(replica_id, 0)
    assert ask(lighthouse, "a", "b") is None
    assert lighthouse.waits_for(0).missing is Missing.NO_MAJORITY


def test_the_id_changes_with_the_members_or_a_failure_and_not_otherwise():
    lighthouse = core("ab")
    assert ask(lighthouse, "a", "b").quorum_id == (1 << 32) + 4
    assert ask(lighthouse, "a", "b", commit_failures=1).quorum_id == (1 << 32) + 5
    assert ask(lighthouse, "a", "b", "c").quorum_id == (1 << 32) + 6


def test_a_new_term_begins_above_all_ids_of_the_old_one():
    assert ask(core("ab", term=2), "a", "b").quorum_id == (2 << 32) + 1


def test_a_new_leader_lets_nobody_go_on_alone_before_the_others_could_find_it():
    lighthouse = core("ab", term=2)
    assert ask(lighthouse, "a", now=0.1) is None
    assert ask(lighthouse, "b", now=0.2).replica_ids == ("a", "b")


def test_a_shrinking_group_keeps_newcomers_out_and_they_are_served_later():
    lighthouse = core("ab")
    lighthouse.ask(member("c"), 0)
    assert ask(lighthouse, "a", "b", shrink_only=True).replica_ids == ("a", "b")
    assert ask(lighthouse, "a", "b", now=1).replica_ids == ("a", "b", "c")


def test_who_hangs_up_is_not_seated():
    lighthouse = core("ab")
    ask(lighthouse, "a")
    lighthouse.withdraw("a", at=0.0)
    assert ask(lighthouse, "b") is None
    assert ask(lighthouse, "a").replica_ids == ("a", "b")


def test_a_hundred_thousand_ids_that_came_and_went_are_forgotten():
    lighthouse = core(policy=TorchftPolicy(replicas_min=2))
    for count in range(100_000):
        lighthouse.heartbeat(f"gone-{count}", count / 1000)
    lighthouse.wake_at = 1000
    ask(lighthouse, "a", "b", now=1000)
    assert set(lighthouse.expiries) == {"a", "b"}


def naive(states, previous, replicas_min):
    """torchft's rule in words: enough, and (all back, or a majority that has waited enough)."""
    asked = {r for r, s in states.items() if s in ("asked", "late")}
    healthy = {r for r, s in states.items() if s != "dead"}
    waited = asked == healthy or "late" in states.values()
    all_back = bool(previous) and set(previous) <= asked
    enough = len(asked) >= replicas_min
    return enough and (all_back or (2 * len(asked) > len(healthy) and waited)), asked


def test_every_state_of_three_groups():
    tried, now = 0, 1000.0
    for mix in itertools.product(("silent", "asked", "late", "dead"), repeat=3):
        states = dict(zip("abc", mix, strict=True))
        for size, replicas_min in itertools.product(range(4), (1, 2)):
            for previous in itertools.combinations("abc", size):
                tried += 1
                asks = {
                    r: Ask(member=member(r), at=now - 90 * (s == "late"))
                    for r, s in states.items()
                    if s != "silent"
                }
                expiries = {r: now + (-1 if s == "dead" else 1) for r, s in states.items()}
                policy = TorchftPolicy(replicas_min=replicas_min)
                answer = decide(asks, expiries, frozenset(previous), policy, now)
                expected, asked = naive(states, previous, replicas_min)
                assert isinstance(answer, NotYet) != expected, (states, previous, answer)
                if expected:
                    assert {m.replica_id for m in answer} == asked
    assert tried == 64 * 8 * 2


@pytest.mark.parametrize("seed", range(200))
def test_the_shortcut_never_misses_a_quorum(seed):
    """A core that always decides and one that looks first give the same quorums."""
    rng, quick, thorough = random.Random(seed), core(), core()
    thorough._may_change = lambda now: True
    now = 0.0
    for _ in range(60):
        now += rng.choice([0, 0.1, 3, 20])
        replica_id = rng.choice("abcde")
        if rng.random() < 0.5:
            for each in (quick, thorough):
                each.heartbeat(replica_id, now)
        else:
            asking = member(replica_id, shrink_only=rng.random() < 0.1)
            for each in (quick, thorough):
                each.ask(asking, now)
        assert quick.poll(now) == thorough.poll(now)
