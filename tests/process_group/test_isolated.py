import random
import signal

import pytest
import torch

from ftcore.process_group import CollectiveFailed, GroupAborted, host_store
from ftcore.process_group.arena import Arena
from ftcore.process_group.isolated import IsolatedGroup
from ftcore.process_group.isolated_codec import decode, dtype_name, dtype_of
from tests.process_group.world import HANG_S, World


@pytest.fixture
def pair():
    host = host_store()
    world = World(IsolatedGroup, 2, address=host.address, timeout_s=HANG_S)
    yield world
    world.close()


def total(group):
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def signal_child(group, number):
    group._life.link._child._process._signal(number)


def test_abort_ends_a_wait_even_when_the_group_itself_is_stuck(pair):
    signal_child(pair.groups[0], signal.SIGSTOP)
    waiting = pair.later(total, pair.groups[0])
    pair.groups[0].abort("stuck in a driver")
    with pytest.raises(GroupAborted, match="stuck in a driver"):
        waiting.result(HANG_S / 2)


def test_a_child_that_is_killed_by_others_is_a_retryable_error_and_replaced(pair):
    waiting = pair.later(total, pair.groups[0])
    signal_child(pair.groups[0], signal.SIGKILL)
    with pytest.raises(CollectiveFailed, match="process of the group ended") as caught:
        waiting.result(HANG_S / 2)
    assert caught.value.retryable
    pair.groups[1].abort("peer lost")
    pair.configure("q2")
    assert pair.each(total) == [[2.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_tensors_larger_than_the_arena_and_of_any_dtype_pass(pair, dtype):
    def story(group):
        tensors = [(torch.arange(n) % 7).to(dtype) for n in (3, 0, 700_000)]
        works = [group.allreduce([t]) for t in tensors if t.numel()]
        [w.wait() for w in works]
        return [int(t.double().sum()) for t in tensors]

    first, second = pair.each(story)
    assert first == second and first[0] == 2 * 3 and first[1] == 0


def test_regions_never_overlap_and_return_to_one_piece():
    arena, rng, held = Arena(), random.Random(3), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            arena.give_back(held.pop(rng.randrange(len(held))))
        else:
            held.append(arena.take(rng.randint(1, 100_000))[0])
            mine = held[-1]
            for other in held[:-1]:
                assert (
                    other.segment != mine.segment
                    or other.offset + other.bytes <= mine.offset
                    or mine.offset + mine.bytes <= other.offset
                )
    for region in held:
        arena.give_back(region)
    assert sorted(r.bytes for r in arena._free) == sorted(s.size for s in arena.segments)


def test_only_dtypes_and_known_options_are_made_from_a_message():
    assert dtype_of(dtype_name(torch.bfloat16)) is torch.bfloat16
    with pytest.raises(ValueError, match="no dtype"):
        dtype_of("load")
    with pytest.raises(KeyError):
        decode({"options": "Popen"}, None)
