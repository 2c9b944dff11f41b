"""Staging memory is the file: where tensors go in it, and what `prepare` makes ready."""

import threading

import torch

from ckpt import Checkpointer
from ckpt.boxes import whole
from ckpt.plan import LARGE_BYTES, Item, plan
from ckpt.region import Region
from ckpt.staging import SMALL_BATCH, Copier, targets_of


def layout_of(*sizes):
    shapes = [(size,) for size in sizes]
    items = [Item(f"t{i}", "uint8", s, whole(s)) for i, s in enumerate(shapes)]
    return plan(items)


def test_large_tensors_are_copied_in_pieces_and_small_ones_many_at_a_time():
    (file,) = layout_of(LARGE_BYTES, 7, 0, *[1] * SMALL_BATCH).files
    targets = targets_of(file, torch.zeros(file.size, dtype=torch.uint8), 0)
    names = [member.item.name for member in file.members]
    assert [names[n] for n in targets.large] == ["t0"]
    assert [len(batch) for batch in targets.small] == [SMALL_BATCH, 1]
    assert all(names.index("t2") not in batch for batch in targets.small)  # it has no bytes


def test_each_view_shows_the_bytes_of_its_member():
    layout = layout_of(LARGE_BYTES, 5)
    (file,) = layout.files
    memory = torch.arange(file.size, dtype=torch.int64).to(torch.uint8)
    for member, view in zip(file.members, targets_of(file, memory, 0).views, strict=True):
        assert view.data_ptr() - memory.data_ptr() == member.offset
        assert view.shape == member.item.shape


def test_views_are_made_once_for_a_layout_and_forgotten_with_the_memory():
    layout, copier = layout_of(5), Copier(lambda: False)
    with Region.create(layout.pool_bytes) as region:
        copier.make_views(layout, region)
        (made,) = copier._views.values()
        copier.make_views(layout, region)
        assert list(copier._views.values()) == [made]
        copier.forget(region)
        assert not copier._views
    copier.close()


def test_prepare_never_writes_into_memory_that_may_hold_a_step(tmp_path):
    state = {"x": torch.arange(9.0)}
    with Checkpointer(str(tmp_path), inline=True) as checkpoints:
        checkpoints.save(state, step=1).wait_durable()
        slot = checkpoints._saver.slots.regions()[0]
        before, slot.headers = bytes(slot.region.view), ""  # as adopted from an earlier life
        checkpoints.prepare({"y": torch.arange(8.0)})
        done = threading.Event()
        checkpoints._saver.submit_call(done.set)
        assert done.wait(30)
        assert bytes(slot.region.view) == before
