"""The gate that optimizers pass, and what goes where before anything is copied."""

import mmap
import threading

import pytest
import torch

from ckpt.pages import touch
from ckpt.plan import FilePlan, Layout, Share
from ckpt.staging import Gate
from ckpt.staging_cuda import CHUNK_BYTES, _batches, files_that_fit


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.close()


class Moment:
    def __init__(self):
        self.delays = 0

    def delay(self):
        self.delays += 1


def optimizer():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=1.0)


def stepping(optimizer):
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    return thread


def layout(*sizes):
    files = tuple(FilePlan(Share("all", 1), 0, 0, size, ()) for size in sizes)
    return Layout(files=files, digest="", aliases=())


def test_a_step_waits_until_a_copy_has_ended(gate):
    gate.enter()
    thread = stepping(optimizer())
    while not gate.is_awaited:
        pass
    assert thread.is_alive()
    gate.leave()
    thread.join()
    assert gate.waited_s > 0 and not gate.is_awaited


def test_a_step_goes_on_behind_the_moment_after_which_a_device_has_copied(gate):
    gate.enter()
    thread, moment = stepping(optimizer()), Moment()
    gate.leave_behind([moment])
    thread.join()
    optimizer().step()
    assert moment.delays == 2
    gate.leave(held=False)
    optimizer().step()
    assert moment.delays == 2


def test_no_step_waits_for_a_snapshot(gate):
    gate.enter(holds=False)
    optimizer().step()
    assert gate.waited_s == 0


@pytest.mark.parametrize(
    ("room", "found"),
    [(0, {}), (29, {}), (30, {2: 0}), (59, {2: 0, 1: 30}), (60, {2: 0, 1: 30, 0: 50})],
)
def test_a_snapshot_takes_the_last_files_that_fit(room, found):
    assert files_that_fit(layout(10, 20, 30), room) == found


def test_a_snapshot_takes_all_files_when_there_is_room():
    assert files_that_fit(layout(10, 20, 30), 1 << 40) == {2: 0, 1: 30, 0: 50}


def test_chunks_cover_every_tensor_once_and_stay_small():
    sources = [torch.arange(n, dtype=torch.uint8) for n in (3, 2 * CHUNK_BYTES + 5, 7)]
    targets = [torch.zeros_like(source) for source in sources]
    for batch in _batches(targets, sources):
        assert sum(part.nbytes for _, part in batch) < 2 * CHUNK_BYTES
        for target, part in batch:
            target += part
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


def test_touching_memory_changes_no_byte():
    with mmap.mmap(-1, 5 << 20) as memory:
        view = torch.frombuffer(memory, dtype=torch.uint8)
        view[::1000] = 7
        before = view.clone()
        touch(view.data_ptr(), len(view), threads=3)
        assert torch.equal(view, before)
        del view
