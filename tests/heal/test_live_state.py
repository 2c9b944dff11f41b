"""What a rank offers and takes through its live state, with real stores and no processes."""

from contextlib import ExitStack

import pytest

from ftcore.crew import Crew
from ftcore.heal import HealFailed
from ftcore.link import Grant
from ftcore.live_state import LiveState
from ftcore.process_group.errors import GroupAborted
from ftcore.process_group.store import host_store
from ftcore.settings import Place
from ftcore.step import Times
from ftcore.wire.messages import Member, Quorum
from tests.heal.states import bits, state, train_step


class Placed:
    """All that a crew asks of its group here."""

    def __init__(self, rank):
        self._rank, self.broken = rank, None

    def rank(self):
        return self._rank

    def error(self):
        return self.broken


class Rank:
    """Group rank `rank` of replica group `name`, at step 3 of quorum 7 unless it is new."""

    def __init__(self, stack, job, name, *, rank=0, seed=0, committed=3, megabytes=8, **options):
        tree = state(seed, megabytes, steps=1 if committed else 0)
        self.model, self.optimizer = tree["model"], tree["optim"]
        self.live = LiveState(
            self.model, self.optimizer, host="127.0.0.1", heal_timeout_s=60.0, **options
        )
        stack.callback(self.live.close)
        if committed:
            self.live.commit(committed - 1, lineage=7)
        self.group = Placed(job.names.index(name))
        place = Place(
            lighthouse=(), job="job", replica_id=name, rank=rank, ranks=1, host="127.0.0.1"
        )
        self.crew = Crew(self.group, place=place, timeout_s=60.0)
        self.live.ready()

    @property
    def bits(self):
        return bits({"model": self.model, "optim": self.optimizer})

    def heal(self, grant, tell=lambda done, total: None):
        return self.live.heal(grant, self.crew, tell=tell)


class Job:
    """Groups of these names at one store; grants of a quorum in which some heal to step 3."""

    def __init__(self, *names):
        self.names, self.store = names, host_store()

    def grant(self, *healing, quorum_id=8):
        members = tuple(
            Member(replica_id=name, incarnation=1, store_address=self.store.address)
            for name in self.names
        )
        quorum = Quorum(
            quorum_id=quorum_id, from_step=3, members=members, healing=frozenset(healing)
        )
        return Grant(step=3, quorum=quorum, must_heal=True, may_run=3)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_a_joiner_takes_model_optimizer_and_position(stack):
    job = Job("a", "b")
    source, joiner = Rank(stack, job, "a"), Rank(stack, job, "b", seed=1, committed=0)
    assert source.live.offer(job.grant("b"), source.crew) > 0
    assert joiner.heal(job.grant("b")) > 0
    assert joiner.bits == source.bits
    assert (joiner.live.committed, joiner.live.lineage) == (3, 7)


def test_rank_i_heals_from_rank_i_of_every_source(stack):
    job, told = Job("a", "b", "c"), []
    ranks = [
        {name: Rank(stack, job, name, rank=i, seed=i, megabytes=16) for name in "ab"}
        for i in range(2)
    ]
    joiners = [Rank(stack, job, "c", rank=i, seed=9, committed=0, megabytes=16) for i in range(2)]
    for groups in ranks:
        for source in groups.values():
            source.live.offer(job.grant("c"), source.crew)
    for joiner in joiners:
        joiner.heal(job.grant("c"), tell=lambda done, total: told.append(total))
    assert [j.bits for j in joiners] == [groups["a"].bits for groups in ranks]
    assert joiners[0].bits != joiners[1].bits


def test_the_optimizer_of_a_source_waits_until_what_is_not_sent_is_aside(stack):
    job = Job("a", "b")
    source, joiner = Rank(stack, job, "a"), Rank(stack, job, "b", seed=1, committed=0)
    before = source.bits
    source.live.offer(job.grant("b"), source.crew)
    train_step(source.model, source.optimizer, 5)
    joiner.heal(job.grant("b"))
    assert joiner.bits == before != source.bits


class Breaks:
    """Lets the crew's quorum break when the first bytes have come."""

    def __init__(self, rank):
        self.rank, self.told = rank, []

    def __call__(self, done, total):
        self.told.append((done, total))
        if done:
            self.rank.group.broken = GroupAborted("a is lost")


@pytest.mark.parametrize("committed", [0, 2])
def test_a_quorum_that_breaks_ends_the_heal_and_the_next_one_goes_on(stack, committed):
    job = Job("a", "b")
    source = Rank(stack, job, "a", megabytes=16, bandwidth_max=1e8)
    joiner = Rank(stack, job, "b", seed=1, committed=committed, megabytes=16)
    before, breaks = joiner.bits, Breaks(joiner)
    source.live.offer(job.grant("b"), source.crew)
    with pytest.raises(GroupAborted):
        joiner.heal(job.grant("b"), tell=breaks)
    assert committed == 0 or joiner.bits == before  # a state of value stays whole
    assert 0 < breaks.told[-1][0] < breaks.told[-1][1]
    joiner.group.broken, told = None, []
    source.live.offer(job.grant("b", quorum_id=9), source.crew)
    joiner.heal(job.grant("b", quorum_id=9), tell=lambda done, total: told.append(done))
    assert next(done for done in told if done) >= breaks.told[-1][0]
    assert joiner.bits == source.bits


def test_a_source_that_makes_no_offer_is_not_waited_for_when_the_quorum_breaks(stack):
    job = Job("a", "b")
    joiner = Rank(stack, job, "b", committed=0)
    joiner.group.broken = GroupAborted("a is lost")
    with pytest.raises(GroupAborted):
        joiner.heal(job.grant("b"))


def test_a_source_that_makes_no_offer_in_time_is_named(stack):
    job = Job("a", "b")
    joiner = Rank(stack, job, "b", committed=0)
    joiner.live._heal_timeout_s = 0.0
    with pytest.raises(HealFailed, match="replica rank 0 did not offer its state in time"):
        joiner.heal(job.grant("b"))


def test_a_heal_holds_a_step_by_its_export_and_by_what_the_reduction_takes_longer_than_usual(stack):
    live = Rank(stack, Job("a"), "a").live
    for reduce_s in (0.1, 0.3, 0.2):
        assert live.held_s(Times(reduce_s=reduce_s)) == 0.0
    assert live.held_s(Times(export_s=0.01, reduce_s=1.2)) == pytest.approx(1.01)
    assert live.held_s(Times(export_s=0.01, reduce_s=0.05)) == pytest.approx(0.01)


def test_a_heal_takes_no_memory_beside_the_state_on_either_side(stack):
    """Of 96 MiB: neither a copy to send from nor one to receive into."""
    job = Job("a", "b")
    source = Rank(stack, job, "a", megabytes=32)
    joiner = Rank(stack, job, "b", seed=1, committed=3, megabytes=32)
    joiner.live.committed = joiner.live.lineage = 0  # new, but its optimizer state is there
    source.live.offer(job.grant("b"), source.crew)
    before = peak_bytes(reset=True)
    joiner.heal(job.grant("b"))
    source.optimizer.step()  # without gradients: comes to the gate and changes nothing
    assert peak_bytes() - before < 32 << 20


def peak_bytes(*, reset=False):
    """The highest resident size of this process since it was last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
