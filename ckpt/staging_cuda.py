"""Copy tensors from a GPU: a snapshot on the device of what there is room for, then paced copies on
a side stream into page-locked staging memory.

The training stream only ever queues one snapshot (16 GiB in 10 to 12 ms on an H200). Two chunks at
most wait at the copy engine, one that moves and the next, because a longer queue delays the
trainer's own `loss.item()`; once an optimizer step waits, all that is left is queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt.capture import Captured
from ckpt.pinned import page_lock, page_unlock
from ckpt.plan import FilePlan, Layout
from ckpt.region import Region

CHUNK_BYTES = 16 << 20
CHUNKS_QUEUED = 2
# Room that a snapshot leaves to the trainer on the device.
DEVICE_ROOM_BYTES = 1 << 30
# Host tensors up to this size together, such as step counters, are copied at once.
HOST_CLONE_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Device memory with the images of some files, and when it was filled."""

    image: torch.Tensor
    starts: Mapping[int, int]  # file number to its place in the image
    filled: Any  # torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Moment:
    """A point on the side stream of a device, after which all copies queued so far have ended."""

    device: torch.device
    event: Any  # torch.cuda.Event

    def delay(self) -> None:
        """What is queued from here on by this thread starts after the moment."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaCopier:
    """One for each process. Knows which regions are page-locked, and owns the side streams.

    is_awaited: whether an optimizer waits, so that the rest is to be queued at once.
    """

    def __init__(self, is_awaited: Callable[[], bool] = lambda: False) -> None:
        self._is_awaited = is_awaited
        self._locked: set[int] = set()
        self._streams: dict[torch.device, Any] = {}
        self._is_lent = (
            False  # one snapshot at a time: saves that queue up must not fill the device
        )
        self._memory = DeviceMemory()

    def snapshot(self, captured: Captured) -> tuple[Captured, Snapshot | None]:
        """Copy device tensors on the training stream, as many whole files as the device has room
        for, the last ones first.

        Returns the state with its small host tensors cloned. Optimizer steps wait for the copies
        of the other files.
        """
        devices = {t.device for t in captured.tensors if t.is_cuda}
        host = [t for t in captured.tensors if not t.is_cuda]
        if self._is_lent or len(devices) != 1 or sum(t.nbytes for t in host) > HOST_CLONE_BYTES_MAX:
            return captured, None
        device, layout = devices.pop(), captured.layout
        starts = files_that_fit(layout, self._memory.room(device))
        image = self._memory.take(sum(layout.files[n].size for n in starts), device)
        if image is None:
            return captured, None
        with torch.no_grad():
            tensors = [t if t.is_cuda else t.clone() for t in captured.tensors]
            captured = replace(captured, tensors=tensors)
            _fill_image(image, starts, captured)
        filled = torch.cuda.Event()
        filled.record(torch.cuda.current_stream(device))
        self._is_lent = True
        return captured, Snapshot(image=image, starts=starts, filled=filled)

    def give_back(self) -> None:
        """The snapshot was copied, or its save was dropped."""
        self._is_lent = False

    def copy_snapshot(
        self, snapshot: Snapshot, number: int, file: FilePlan, target: torch.Tensor
    ) -> None:
        """Bring one file image from the device. `target` is the file in staging memory."""
        start = snapshot.starts[number]
        source = snapshot.image[start + file.data_start : start + file.size]
        self._copy_paced([target[file.data_start :]], [source], snapshot.filled)
        self.finish()

    def copy_tensors(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], ready: Any
    ) -> None:
        """Queue copies of live device tensors. `ready` is an event of the training stream after
        their last write. They have ended after the next of `moments`, or after `finish`."""
        by_device: dict[torch.device, list[int]] = {}
        for index, source in enumerate(sources):
            by_device.setdefault(source.device, []).append(index)
        for indices in by_device.values():
            self._copy_paced([targets[i] for i in indices], [sources[i] for i in indices], ready)

    def moments(self) -> list[Moment]:
        """Now, on each side stream."""
        return [Moment(device, _recorded(stream)) for device, stream in self._streams.items()]

    def finish(self) -> None:
        """Wait, without spinning: the processor belongs to the trainer."""
        for moment in self.moments():
            moment.event.synchronize()

    def _copy_paced(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], ready: Any
    ) -> None:
        stream = self._stream(sources[0].device)
        queue: deque[Any] = deque()
        stream.wait_event(ready)
        with torch.no_grad(), torch.cuda.stream(stream):
            for batch in _batches(targets, sources):
                for to, part in batch:
                    to.copy_(part, non_blocking=True)
                queue.append(_recorded(stream))
                if len(queue) == CHUNKS_QUEUED and not self._is_awaited():
                    queue.popleft().synchronize()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def register(self, region: Region) -> None:
        """Page-lock a region once, so that copies into it are asynchronous."""
        if region.address not in self._locked and page_lock(region.address, region.size):
            self._locked.add(region.address)

    def forget(self, region: Region) -> None:
        if region.address in self._locked:
            self._locked.discard(region.address)
            page_unlock(region.address)


class DeviceMemory:
    """How much of the device training never uses, seen from its highest use so far: what the next
    forward pass will need again is no room, though it is free at the moment of a save."""

    def __init__(self) -> None:
        self._peak = 0
        self._taken = 0

    def room(self, device: torch.device) -> int:
        free, _ = torch.cuda.mem_get_info(device)
        # With a snapshot alive the peak counts ours, too.
        self._peak = max(self._peak, torch.cuda.max_memory_allocated(device) - self._taken)
        return int(free + torch.cuda.memory_reserved(device) - self._peak) - DEVICE_ROOM_BYTES

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Zeroed, because padding is saved, too."""
        if not nbytes:
            return None
        try:
            image = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:  # enough in sum, but in pieces
            return None
        self._taken = nbytes
        return image


def files_that_fit(layout: Layout, room: int) -> dict[int, int]:
    """The last files that fit into `room` bytes together, each with its place."""
    starts: dict[int, int] = {}
    used = 0
    for number in reversed(range(len(layout.files))):
        if used + layout.files[number].size > room:
            break
        starts[number] = used
        used += layout.files[number].size
    return starts


def _fill_image(image: torch.Tensor, starts: Mapping[int, int], captured: Captured) -> None:
    targets, sources = [], []
    for number, start in starts.items():
        members = captured.layout.files[number].members
        for member, source in zip(members, captured.sources(number), strict=True):
            if member.item.nbytes:
                at = start + member.offset
                raw = image[at : at + member.item.nbytes]
                targets.append(raw.view(source.dtype).view(member.item.box.lengths))
                sources.append(source)
    if targets:
        torch._foreach_copy_(targets, sources)


Part = tuple[torch.Tensor, torch.Tensor]  # target and source


def _batches(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> Iterator[list[Part]]:
    """Parts that make up about one chunk together."""
    batch: list[Part] = []
    nbytes = 0
    for target, source in zip(targets, sources, strict=True):
        for part in _chunks(target, source):
            batch.append(part)
            nbytes += part[1].nbytes
            if nbytes >= CHUNK_BYTES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _chunks(target: torch.Tensor, source: torch.Tensor) -> Iterator[Part]:
    """Parts of at most one chunk; a tensor that is not contiguous is one part."""
    if not source.is_contiguous() or source.nbytes <= CHUNK_BYTES:
        yield target, source
        return
    flat_target, flat_source = target.reshape(-1), source.reshape(-1)
    step = max(1, CHUNK_BYTES // source.element_size())
    for at in range(0, flat_source.numel(), step):
        yield flat_target[at : at + step], flat_source[at : at + step]


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
