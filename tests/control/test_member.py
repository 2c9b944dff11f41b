from ftcore.control.ballot import Ballot
from ftcore.control.member import MemberCore
from ftcore.wire.messages import LostMember, Member, Prepare, Quorum, Want, quorum_id_of

ME, OTHER = (Member(replica_id=n, incarnation=1) for n in ("a", "b"))


def quorum(number, *, from_step=0, healing=(), members=(ME, OTHER), term=1):
    return Quorum(
        quorum_id=quorum_id_of(term, number),
        from_step=from_step,
        members=members,
        healing=frozenset(healing),
    )


def prepare(number, *, broken=False, abort=False):
    return Prepare(change_id=quorum_id_of(1, number), is_broken=broken, must_abort=abort)


def training(*, lookahead=0):
    """A member that runs step 0 of the first quorum."""
    core = MemberCore(ME, lookahead=lookahead)
    assert core.try_start() is None and core.want is Want.SEAT
    assert core.new_quorum(quorum(1))
    assert core.try_start().step == 0
    return core


def test_steps_go_on_without_asking_while_the_quorum_stands():
    core = training()
    for step in range(1, 5):
        core.finish(is_committed=True)
        assert core.try_start().step == step
    assert core.report().quorum_id == quorum_id_of(1, 1)


def test_a_gentle_prepare_is_promised_at_once_and_holds_one_step_later():
    core = training()
    core.prepare(prepare(2))
    assert (core.report().promised, core.report().limit) == (quorum_id_of(1, 2), 1)
    core.finish(is_committed=True)
    assert core.try_start().step == 1
    core.finish(is_committed=True)
    assert core.try_start() is None


def test_the_new_quorum_lifts_the_promise_and_takes_over_at_its_step():
    core = training()
    core.prepare(prepare(2))
    core.new_quorum(quorum(2, from_step=2))
    for expected in (1, 2):
        core.finish(is_committed=True)
        go = core.try_start()
        assert (go.step, go.quorum.quorum_id) == (expected, quorum_id_of(1, expected))


def test_a_broken_prepare_is_promised_when_the_step_has_ended():
    core = training()
    assert not core.prepare(prepare(2, broken=True))
    assert core.report().promised == 0
    core.finish(is_committed=True)
    assert core.report().promised == quorum_id_of(1, 2)
    assert core.try_start() is None


def test_a_failed_step_elsewhere_aborts_the_running_one():
    assert training().prepare(prepare(2, broken=True, abort=True))


def test_a_lost_member_aborts_only_a_step_that_needs_it():
    core, stranger = (
        training(),
        LostMember(quorum_id=quorum_id_of(1, 1), replica_id="z", incarnation=1, reason="died"),
    )
    assert not core.lost_member(stranger)
    assert core.lost_member(
        LostMember(quorum_id=quorum_id_of(1, 1), replica_id="b", incarnation=1, reason="died")
    )


def test_an_answer_of_a_deposed_leader_is_refused():
    core = training()
    core.new_quorum(quorum(1, from_step=1, term=2))
    assert not core.new_quorum(quorum(9, from_step=1, term=1))


def test_a_member_that_was_given_up_lets_go_and_asks_for_a_new_seat():
    core = training()
    lost = LostMember(quorum_id=quorum_id_of(1, 1), replica_id="a", incarnation=1, reason="silent")
    assert core.lost_member(lost)
    core.finish(is_committed=False, reason="aborted")
    assert core.try_start() is None
    assert (core.report().left_id, core.want) == (quorum_id_of(1, 1), Want.SEAT)
    assert not core.new_quorum(quorum(1)), "a late copy of the quorum it let go of"


def test_a_healing_member_enters_at_once_and_votes_only_after_the_heal():
    core = MemberCore(ME)
    core.try_start()
    core.new_quorum(quorum(1, from_step=7, healing=("a",)))
    go = core.try_start()
    assert (go.step, go.must_heal) == (7, True)
    core.state_torn()
    assert not core.report().is_valid
    core.heal_ended(lineage=3)
    core.finish(is_committed=True)
    assert (core.committed, core.report().is_valid) == (8, True)


def test_with_lookahead_the_ranks_may_run_one_step_further_and_a_promise_counts_it():
    core = training(lookahead=1)
    assert core.running.may_run == 1
    core.prepare(prepare(2))
    assert core.report().limit == 2
    core.finish(is_committed=True)
    assert (core.running.step, core.running.may_run) == (1, 2)


def test_news_is_what_changed_and_not_that_a_step_was_counted():
    core = training()
    core.report()
    core.finish(is_committed=True)
    core.try_start()
    assert core.news() is None
    core.prepare(prepare(2))
    assert core.news().promised == quorum_id_of(1, 2)
    assert core.news() is None


def test_a_ballot_is_complete_with_all_ranks_and_tells_the_first_no():
    ballot = Ballot(3)
    assert not ballot.say(2, "out of memory")
    assert not ballot.say(0)
    assert ballot.say(1, "not finite")
    assert ballot.reason == "rank 1: not finite"


def test_a_report_says_how_far_the_heal_of_all_ranks_is_until_it_ends():
    core = MemberCore(ME)
    core.try_start()
    core.new_quorum(quorum(1, healing={"a"}))
    assert core.try_start().must_heal
    core.heal_goes_on(0, bytes_done=10, bytes_total=100)
    core.heal_goes_on(1, bytes_done=20, bytes_total=100)
    core.heal_goes_on(0, bytes_done=30, bytes_total=100)
    assert (core.report().heal_bytes_done, core.report().heal_bytes_total) == (50, 200)
    core.heal_ended(lineage=0)
    assert core.report().heal_bytes_total == 0


def test_a_heal_that_breaks_off_is_no_longer_reported():
    core = MemberCore(ME)
    core.try_start()
    core.new_quorum(quorum(1, healing={"a"}))
    core.try_start()
    core.heal_goes_on(0, bytes_done=10, bytes_total=100)
    core.finish(is_committed=False, reason="a source died")
    core.heal_goes_on(0, bytes_done=20, bytes_total=100)  # late
    assert core.report().heal_bytes_total == 0


def test_a_survivor_says_how_long_the_heals_of_others_held_it():
    core = training()
    core.timed(group_s=0.1, heal_s=0.0, held_s=0.02)
    core.timed(group_s=0.1, heal_s=0.0, held_s=0.05)
    core.finish(is_committed=True)
    assert core.report().held_s == 0.05


def test_a_member_that_cannot_go_on_says_so_to_whoever_leads_now():
    core = training()
    core.finish(is_committed=True)
    core.lost_member(
        LostMember(quorum_id=quorum_id_of(1, 1), replica_id="b", incarnation=1, reason="died")
    )
    assert core.try_start() is None
    assert core.report().failed_id == quorum_id_of(1, 1) and core.report().reason == "b died"
