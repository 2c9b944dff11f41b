import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from ftcore.data import DataOrderDiffers, EpochEnd, Ledger, deal, owned_by


def committed(ledger, steps):
    samples = []
    for _ in range(steps):
        samples += itertools.chain(*ledger.batches().samples)
        ledger.commit()
    return samples


@pytest.mark.parametrize("epoch_end", EpochEnd)
@pytest.mark.parametrize("size", [1, 5, 12, 13, 100])
def test_an_epoch_that_does_not_divide_evenly_is_exact(epoch_end, size):
    ledger = Ledger(size=size, shards=3, per_shard=4, epoch_end=epoch_end)
    samples = []
    while ledger.epoch < 3:
        samples += committed(ledger, 1)
    for epoch in range(3):
        assert sorted(samples[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_step_that_is_not_committed_is_repeated_with_the_same_samples():
    ledger = Ledger(size=100, shards=2, per_shard=3)
    first = ledger.batches()
    assert ledger.batches() is first
    ledger.commit()
    assert ledger.batches() != first


def test_a_short_step_is_spread_over_the_shards():
    ledger = Ledger(size=11, shards=4, per_shard=2, epoch_end=EpochEnd.SHORT, position=8)
    assert [len(s) for s in ledger.batches().samples] == [0, 1, 1, 1]
    assert ledger.batches().count == 3


def test_looking_ahead_is_what_will_be():
    ledger = Ledger(size=11, shards=2, per_shard=2, epoch_end=EpochEnd.SHORT)
    ahead = [ledger.batches(ahead=i) for i in range(6)]
    for expected in ahead:
        assert ledger.batches() == expected
        ledger.commit()


def test_the_position_is_the_only_state():
    ledger = Ledger(size=50, seed=3, shards=2, per_shard=4)
    committed(ledger, 5)
    other = Ledger(size=50, seed=3, shards=2, per_shard=4)
    other.load_state_dict(ledger.state_dict())
    assert other.batches() == ledger.batches()


def test_shards_and_batch_may_change_at_a_committed_position():
    ledger = Ledger(size=60, shards=2, per_shard=3)
    samples = committed(ledger, 4)
    wider = Ledger(size=60, shards=4, per_shard=3)
    wider.load_state_dict(ledger.state_dict())
    assert sorted(samples + committed(wider, 3)) == list(range(60))


@pytest.mark.parametrize("change", [{"size": 51}, {"seed": 4}])
def test_a_position_of_other_data_is_refused_by_name(change):
    state = Ledger(size=50, seed=3).state_dict()
    (name,) = change
    with pytest.raises(DataOrderDiffers, match=f"was made with {name}"):
        Ledger(**({"size": 50, "seed": 3} | change)).load_state_dict(state)


@pytest.mark.parametrize("name", ["size", "shards", "per_shard"])
def test_nothing_to_take_is_refused(name):
    with pytest.raises(DataOrderDiffers, match=f"{name} is 0"):
        Ledger(**({"size": 5} | {name: 0}))


def test_shards_are_dealt_evenly_and_only_to_participants():
    for shards, count in itertools.product(range(1, 20), range(1, 12)):
        owners = deal(shards=shards, participants=[f"r{i}" for i in range(count)])
        loads = Counter(owners)
        assert len(owners) == shards
        assert max(loads.values()) - min(loads.values()) <= 1
        assert len(loads) == min(shards, count)
        assert list(owners) == sorted(owners, key=lambda r: int(r[1:]))


def test_owners_know_their_shards():
    assert owned_by("b", deal(shards=5, participants="ab")) == (3, 4)
    assert owned_by("c", deal(shards=5, participants="ab")) == ()


def test_nobody_can_own_nothing():
    with pytest.raises(ValueError, match="nobody"):
        deal(shards=2, participants=[])


class World:
    """Replica groups that step, fail, die, join, heal and restart from checkpoints, by seed."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.size = self.rng.randint(1, 40)
        self.fresh = Ledger(
            size=self.size,
            seed=seed,
            shards=self.rng.randint(1, 5),
            per_shard=self.rng.randint(1, 4),
            epoch_end=self.rng.choice(list(EpochEnd)),
        )
        self.groups = {name: replace(self.fresh) for name in "abc"}
        self.log = []  # of committed steps: the samples that the groups really read
        self.checkpoint = (self.fresh.state_dict(), 0)

    def step(self):
        names = sorted(self.groups)
        owners = deal(shards=self.fresh.shards, participants=names)
        read, died = [], None
        if len(names) > 1 and self.rng.random() < 0.15:
            died = self.rng.choice(names)
        for name in names:
            batches = self.groups[name].batches()
            for shard in owned_by(name, owners):
                read += batches.samples[shard]
        if died:
            del self.groups[died]
        elif self.rng.random() < 0.8:  # else the step fails for another reason
            self.log.append(read)
            for ledger in self.groups.values():
                ledger.commit()

    def join(self):
        source = self.rng.choice(sorted(self.groups))
        joiner = replace(self.fresh)
        joiner.load_state_dict(self.groups[source].state_dict())
        self.groups[f"j{self.rng.randint(0, 10**9)}"] = joiner

    def restart(self):
        state, length = self.checkpoint
        self.log = self.log[:length]
        for ledger in self.groups.values():
            ledger.load_state_dict(state)

    def save(self):
        self.checkpoint = (next(iter(self.groups.values())).state_dict(), len(self.log))

    def run(self, epochs):
        while next(iter(self.groups.values())).epoch < epochs:
            for event, chance in ((self.join, 0.15), (self.save, 0.2), (self.restart, 0.03)):
                if self.rng.random() < chance and (event != self.join or len(self.groups) < 6):
                    event()
            self.step()


@pytest.mark.parametrize("seed", range(300))
def test_each_sample_is_committed_exactly_once_per_epoch_whatever_happens(seed):
    world = World(seed)
    world.run(epochs=3)
    samples = list(itertools.chain(*world.log))
    for epoch in range(3):
        part = samples[epoch * world.size : (epoch + 1) * world.size]
        assert sorted(part) == list(range(world.size)), f"seed {seed}, epoch {epoch}"


def test_the_committed_stream_is_that_of_the_unfailed_run():
    world = World(12)
    world.run(epochs=3)
    assert list(itertools.chain(*world.log)) == committed(replace(world.fresh), len(world.log))
