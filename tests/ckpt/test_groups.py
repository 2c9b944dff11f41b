"""Replica groups that save together, come and go: `sit`, `join`, and saves of one group alone."""

import pytest
import torch

from ckpt import Checkpointer
from ckpt.listing import newest_first, read_manifest
from ckpt.stores import open_store
from ckpt.tools import verify

STATE = {f"w{i}": torch.arange(1 << 18, dtype=torch.float32) + i for i in range(4)} | {"step": 3}
OTHER = {name: -value for name, value in STATE.items()}


@pytest.fixture
def opened(tmp_path):
    """Opens one checkpointer for each group, and closes all."""
    found = []

    def open_groups(*names, **options):
        for name in names:
            checkpoints = Checkpointer(tmp_path, inline=True, **options)
            checkpoints.sit(f"{name}/0", rank=0, ranks=1)
            found.append(checkpoints)
        return found[-len(names) :]

    yield open_groups
    for checkpoints in found:
        checkpoints.close(wait=False)


def join_all(session, *groups, gone=()):
    for number, checkpoints in enumerate(groups):
        checkpoints.join(session, group=number, groups=len(groups), gone=gone)


def manifest(path, step):
    assert verify(open_store(str(path)), step, deep=True).is_good
    return read_manifest(open_store(str(path)), step)


def test_groups_write_each_a_part_and_the_step_is_whole(tmp_path, opened):
    a, b = opened("a", "b")
    join_all("one", a, b)
    for handle in [group.save(STATE, step=1) for group in (a, b)]:
        handle.wait_durable(30)
    assert {f.key.split("-")[1] for f in manifest(tmp_path, 1).files} == {"00000", "00001"}


def test_a_group_that_joins_later_saves_with_the_others(tmp_path, opened):
    a, b = opened("a", "b")
    join_all("one", a, b)
    for handle in [group.save(STATE, step=1) for group in (a, b)]:
        handle.wait_durable(30)
    (c,) = opened("c")
    join_all("two", a, b, c)
    for handle in [group.save(STATE, step=2) for group in (a, b, c)]:
        handle.wait_durable(30)
    assert [manifest(tmp_path, step).participants for step in (1, 2)] == [2, 3]


def test_a_group_that_leaves_without_its_part_is_replaced_at_once(tmp_path, opened):
    a, b = opened("a", "b", participants_timeout_s=3600.0)
    join_all("one", a, b)
    handle = a.save(STATE, step=1)
    handle.wait_staged(30)
    b.close()
    handle.wait_durable(30)
    assert manifest(tmp_path, 1).participants == 2


def test_a_group_that_fell_behind_is_replaced_when_the_others_say_so(tmp_path, opened):
    """It lives, but heals in the next quorum: it will never have the state of this step."""
    a, b = opened("a", "b", participants_timeout_s=3600.0)
    join_all("one", a, b)
    handle = a.save(STATE, step=1)
    handle.wait_staged(30)
    a.join("two", group=0, groups=2, gone=[1])
    handle.wait_durable(30)
    b.join("two", group=1, groups=2)
    for later in [group.save(STATE, step=2) for group in (a, b)]:
        later.wait_durable(30)
    assert newest_first(open_store(str(tmp_path))) == [2, 1]


def test_a_group_alone_saves_all_by_itself_and_fences_nobody(tmp_path, opened):
    a, b = opened("a", "b", participants_timeout_s=3600.0)
    join_all("one", a, b)
    a.save(STATE, step=7, alone=True).wait_durable(30)
    assert manifest(tmp_path, 7).participants == 1
    for handle in [group.save(STATE, step=8) for group in (a, b)]:
        handle.wait_durable(30)
    assert manifest(tmp_path, 8).participants == 2


def test_both_groups_alone_may_save_the_same_step(tmp_path, opened):
    a, b = opened("a", "b")
    join_all("one", a, b)
    for handle in [group.save(STATE, step=7, alone=True) for group in (a, b)]:
        handle.wait_durable(30)
    assert manifest(tmp_path, 7).participants == 1


def test_two_living_trainers_with_one_seat_never_share_memory(tmp_path):
    """The second is given no memory that the first still copies into."""
    with Checkpointer(tmp_path / "x", inline=True) as first:
        first.save(STATE, step=1).wait_durable(30)
        with Checkpointer(tmp_path / "x", inline=True) as second:
            assert not second._saver.slots.regions()
            second.save(OTHER, step=2).wait_durable(30)
            assert read_own(first) != read_own(second)
    found = empty()
    with Checkpointer(tmp_path / "x", inline=True) as third:
        assert third.restore(found) == 2
    assert torch.equal(found["w3"], OTHER["w3"])


def empty():
    return {n: torch.zeros(1 << 18) if n != "step" else 0 for n in STATE}


def read_own(checkpoints):
    (slot,) = checkpoints._saver.slots.regions()
    return bytes(slot.region.view[:65536])


def test_a_new_life_goes_on_with_the_memory_of_its_seat(tmp_path, opened):
    a, b = opened("a", "b")
    join_all("one", a, b)
    for handle in [group.save(STATE, step=1) for group in (a, b)]:
        handle.wait_durable(30)
    a.close(keep_memory=True)
    (again,) = opened("a")
    assert len(again._saver.slots.regions()) == 1
    found = empty()
    assert again.restore(found) == 1 and again.last_restored.tier == "memory"
    assert torch.equal(found["w3"], STATE["w3"])
