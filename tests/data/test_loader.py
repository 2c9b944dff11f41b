import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ftcore.data import (
    DataOrderDiffers,
    ElasticBatchSampler,
    ElasticLoader,
    ElasticSampler,
    Ledger,
    ReplayShards,
    deal,
    owned_by,
    seed_for,
    shard_rng,
)


class Numbers:
    """Item i is i; `reads` counts what was loaded."""

    def __init__(self, size):
        self.size, self.reads = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.reads.append(i)
        return i


class Noisy(Numbers):
    """An augmentation that draws from all three generators."""

    def __getitem__(self, i):
        return i + torch.rand(()).item() / 4 + random.random() / 4 + np.random.rand() / 4


def ledger(size=40, **options):
    return Ledger(**({"size": size, "seed": 1, "shards": 4, "per_shard": 2} | options))


def test_a_step_gives_the_batches_of_the_owned_shards():
    loader = ElasticLoader(Numbers(40), ledger())
    expected = ledger().batches().samples
    parts = loader.step([1, 3])
    assert [(p.shard, p.data.tolist()) for p in parts] == [(k, list(expected[k])) for k in (1, 3)]
    assert parts[0].seed == seed_for(1, 0, 1)


def test_a_repeated_step_is_served_from_memory():
    data = Numbers(40)
    loader = ElasticLoader(data, ledger())
    first = loader.step([0, 1])
    assert loader.step([0, 1])[0] is first[0]
    assert len(data.reads) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_change_of_owners_drops_what_was_loaded_ahead(workers):
    loader = ElasticLoader(Numbers(40), ledger(), num_workers=workers)
    twin = ledger()
    for owned in ([0, 1], [0, 1], [0, 1, 2, 3], [2], [], [2], [1, 2]):
        parts = loader.step(owned)
        expected = twin.batches().samples
        assert [p.data.tolist() for p in parts] == [list(expected[k]) for k in owned]
        loader.commit()
        twin.commit()


def test_batches_of_this_step_that_stay_are_not_loaded_again():
    data = Numbers(40)
    loader = ElasticLoader(data, ledger())
    loader.step([0, 1])
    parts = loader.step([1, 2])
    assert [p.shard for p in parts] == [1, 2]
    assert len(data.reads) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_the_shard_and_not_on_who_reads_it(workers):
    alone = ElasticLoader(Noisy(40), ledger(), num_workers=0)
    shared = ElasticLoader(Noisy(40), ledger(), num_workers=workers)
    expected = {p.shard: p.data.tolist() for p in alone.step(range(4))}
    assert {p.shard: p.data.tolist() for p in shared.step([2, 3])} == {
        k: expected[k] for k in (2, 3)
    }


def test_a_loaded_position_starts_the_loader_anew():
    loader = ElasticLoader(Numbers(40), ledger())
    state = loader.state_dict()
    first = loader.step([0])[0].data.tolist()
    loader.commit()
    loader.step([0])
    loader.load_state_dict(state)
    assert loader.step([0])[0].data.tolist() == first


@pytest.mark.parametrize("seed, workers", [(seed, 0) for seed in range(10)] + [(1, 2), (5, 2)])
def test_each_sample_is_committed_once_while_owners_change_with_or_without_workers(seed, workers):
    rng = random.Random(seed)

    def loader():
        return ElasticLoader(Numbers(30), ledger(30), num_workers=workers)

    groups = {name: loader() for name in "ab"}
    seen = []
    for step in range(12):
        owners = deal(shards=4, participants=sorted(groups))
        parts = [p for g in groups for p in groups[g].step(owned_by(g, owners))]
        if rng.random() < 0.3:
            continue  # the step failed
        seen += itertools.chain(*(p.data.tolist() for p in sorted(parts, key=lambda p: p.shard)))
        for each in groups.values():
            each.commit()
        if rng.random() < 0.3:
            joiner = loader()
            joiner.load_state_dict(groups["a"].state_dict())
            groups[f"j{step}"] = joiner
        if len(groups) > 2 and rng.random() < 0.3:
            groups.pop(sorted(groups)[-1])
    whole = len(seen) // 30 * 30
    for epoch in range(0, whole, 30):
        assert sorted(seen[epoch : epoch + 30]) == list(range(30))


def test_the_sampler_goes_into_an_ordinary_data_loader():
    sampler = ElasticSampler(40, seed=1, shards=4, per_shard=2, owned=[1, 2])
    batches = list(DataLoader(Numbers(40), batch_sampler=ElasticBatchSampler(sampler)))
    twin = ledger()
    expected = []
    for _ in range(5):
        expected += [list(twin.batches().samples[k]) for k in (1, 2)]
        twin.commit()
    assert [b.tolist() for b in batches] == expected
    assert len(ElasticBatchSampler(sampler)) == len(batches)
    assert list(sampler) == list(itertools.chain(*expected))
    assert len(sampler) == 20


def test_iterating_the_sampler_moves_nothing_and_committing_does():
    sampler = ElasticSampler(Numbers(8), shards=2, per_shard=2)
    assert list(sampler) == list(sampler)
    first = list(sampler)
    sampler.commit()
    assert list(sampler) == first[4:]
    again = ElasticSampler(Numbers(8), shards=2, per_shard=2)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == first[4:]


def open_numbers(shard, epoch):
    return iter([f"{shard}.{epoch}.{i}" for i in range(3 + shard)])


class Stateful:
    """As torchdata's StatefulDataLoader behaves: its state is the number of items given."""

    opened = 0

    def __init__(self, shard, epoch):
        type(self).opened += 1
        self.items, self.at, self.skipped = list(open_numbers(shard, epoch)), 0, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]


class Words(IterableDataset):
    """An iterable set whose workers share the items of one shard."""

    def __init__(self, shard, epoch):
        self.words = list(open_numbers(shard, epoch))

    def __iter__(self):
        info = get_worker_info()
        yield from self.words[info.id :: info.num_workers] if info else self.words


def open_stateful_loader(shard, epoch):
    """The real thing, with a worker process."""
    return StatefulDataLoader(Words(shard, epoch), batch_size=None, num_workers=1)


def test_torchdata_s_loader_with_workers_goes_on_where_another_group_left_it():
    def shards():
        return ReplayShards(open_stateful_loader, shards=2, per_shard=2, lengths=[3, 4])

    alone = ReplayShards(open_numbers, shards=2, per_shard=2, lengths=[3, 4])
    a, b = shards(), shards()
    for owned_by_a in ([0, 1], [0], [1], [], [0, 1]):
        owned_by_b = [shard for shard in (0, 1) if shard not in owned_by_a]
        assert a.step(owned_by_a) | b.step(owned_by_b) == alone.step([0, 1])
        for each in (alone, a, b):
            each.commit()


@pytest.mark.parametrize("open_shard", [open_numbers, Stateful])
@pytest.mark.parametrize("lengths", [None, [3, 4, 5]])
def test_iterable_shards_are_exact_over_changing_owners(open_shard, lengths):
    def shards():
        return ReplayShards(open_shard, shards=3, per_shard=2, lengths=lengths)

    alone = shards()
    groups = {"a": shards(), "b": shards()}
    rng = random.Random(4)
    for _ in range(25):
        owners = deal(shards=3, participants=sorted(groups))
        expected = alone.step(range(3))
        got = {}
        for name, group in groups.items():
            got |= group.step(owned_by(name, owners))
        assert got == expected
        if rng.random() < 0.3:
            continue
        for each in (alone, *groups.values()):
            each.commit()
        if rng.random() < 0.4:
            joiner = shards()
            joiner.load_state_dict(groups["a"].state_dict())
            groups[f"j{len(groups)}"] = joiner
        elif len(groups) > 1 and rng.random() < 0.4:
            groups.pop(sorted(groups)[-1])


def test_a_state_that_is_known_saves_the_replay():
    first = ReplayShards(Stateful, shards=1, per_shard=2)
    first.step([0])
    first.commit()
    again = ReplayShards(Stateful, shards=1, per_shard=2)
    again.load_state_dict(first.state_dict())
    read = []
    stream = again._stream(0)
    assert stream.taken == 2 and not read
    assert again.step([0]) == first.step([0])


@pytest.mark.parametrize("change", [{"shards": 2}, {"per_shard": 3}])
def test_a_position_of_other_shards_is_refused(change):
    state = ReplayShards(open_numbers, shards=3, per_shard=2).state_dict()
    options = {"shards": 3, "per_shard": 2} | change
    with pytest.raises(DataOrderDiffers):
        ReplayShards(open_numbers, **options).load_state_dict(state)


def test_a_shard_without_items_is_named():
    empty = ReplayShards(lambda shard, epoch: [], shards=1, per_shard=1)
    with pytest.raises(DataOrderDiffers, match="shard 0 has no items"):
        empty.step([0])


def test_shard_rng_is_the_same_everywhere_and_leaves_no_trace():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with shard_rng(1, step=2, shard=3) as seed:
        first = draw()
    with shard_rng(1, step=2, shard=3):
        assert draw() == first
    with shard_rng(1, step=2, shard=4):
        assert draw() != first
    assert seed == seed_for(1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
