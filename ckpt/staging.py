"""Copy live tensors into shared staging memory while training goes on, before they change again."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.capture import Captured
from ckpt.errors import StagingTorn
from ckpt.plan import LARGE_BYTES, FilePlan, Member
from ckpt.region import Region
from ckpt.staging_cuda import CudaCopier, Moment, Snapshot
from ftcore.statedict.memory import is_plain_memory

# Work is dealt to two threads in pieces of this size: small enough to end together.
UNIT_BYTES = 8 << 20
SMALL_BATCH = 2048
COPY_THREADS = 2
# Copying yields to the training loop; when the optimizer waits for it, the processors are free.
COPY_NICENESS = 5


class Sink(Protocol):
    """Where the images of files are put, and who is told when one is whole."""

    def begin(self, number: int, size: int) -> tuple[Region, int]:
        """Memory for file `number`: a region and an offset. May wait until some is free."""

    def staged(self, number: int, offset: int) -> None: ...


class Gate:
    """Holds every optimizer step of this process back until what is being copied is copied.

    The hook is global, because a forgotten optimizer would tear the checkpoint silently.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open_copies = 0
        self._waiting = 0
        self._moments: tuple[Moment, ...] = ()
        self.waited_s = 0.0
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    @property
    def is_awaited(self) -> bool:
        """Whether a step waits right now."""
        return self._waiting > 0

    def enter(self, *, holds: bool = True) -> None:
        """A copy begins. It holds optimizers back unless it reads a snapshot."""
        with self._changed:
            self._open_copies += holds

    def leave(self, *, held: bool = True) -> None:
        with self._changed:
            self._open_copies -= held
            self._moments = ()
            self._changed.notify_all()

    def leave_behind(self, moments: Sequence[Moment]) -> None:
        """All is queued on devices: from here on steps wait there, and not on the host."""
        with self._changed:
            self._open_copies -= 1
            self._moments = tuple(moments)
            self._changed.notify_all()

    def wait(self) -> None:
        """Return once nothing is being copied any more, or will not be when the device gets to
        what this thread queues next."""
        if self._open_copies:
            started = time.perf_counter()
            with self._changed:
                self._waiting += 1
                self._changed.wait_for(lambda: not self._open_copies)
                self._waiting -= 1
            self.waited_s += time.perf_counter() - started
        for moment in self._moments:
            moment.delay()

    def close(self) -> None:
        self._handle.remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.wait()


@dataclass(frozen=True, slots=True)
class Versions:
    """The version counters of tensors at one moment: every in-place write raises them."""

    tensors: Sequence[torch.Tensor]
    counts: list[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Versions:
        return cls(tensors, _versions(tensors))

    def check(self, names: Callable[[], Sequence[str]]) -> None:
        """Raise StagingTorn when a tensor was written to since."""
        now = _versions(self.tensors)
        if now == self.counts:
            return
        pairs = zip(names(), self.counts, now, strict=True)
        changed = [name for name, before, after in pairs if before != after]
        raise StagingTorn(
            f"{len(changed)} tensors changed while they were copied, the first is {changed[0]}"
        )


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """An inference tensor counts nothing and cannot be trained in place."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [-1 if t.is_inference() else t._version for t in tensors]


class Copier:
    """Copies tensors in host memory with two threads, and has those on devices copied.
    Destination views are made once and kept."""

    def __init__(self, is_awaited: Callable[[], bool]) -> None:
        self.cuda = CudaCopier(is_awaited)
        self._pool = ThreadPoolExecutor(COPY_THREADS, "ckpt-copy", initializer=_yield_to_training)
        self._bases: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[str, int, int, int], Targets] = {}

    def copy(
        self,
        number: int,
        captured: Captured,
        region: Region,
        offset: int,
        *,
        snapshot: Snapshot | None = None,
        ready: Any = None,
    ) -> None:
        """Put the members of file `number` into `region` at `offset`, from the snapshot if that
        has the file. Else tensors on a device are read once the event `ready` has passed, and have
        arrived after `cuda.finish()`."""
        file = captured.layout.files[number]
        if snapshot is not None and number in snapshot.starts:
            target = self._base(region)[offset : offset + file.size]
            self.cuda.copy_snapshot(snapshot, number, file, target)
            return
        sources = captured.sources(number)
        targets = self._targets(file, captured.layout.digest, region, offset)
        on_device = {n for n, source in enumerate(sources) if source.is_cuda}
        if on_device:
            moved = [n for n in on_device if sources[n].numel()]
            views = [targets.views[n] for n in moved]
            self.cuda.copy_tensors(views, [sources[n] for n in moved], ready)
        units: list[Callable[[], object]] = []
        for n in targets.large:
            if n not in on_device:
                start = offset + file.members[n].offset
                units += _units(sources[n], targets.views[n], region, start)
        for batch in targets.small:
            if here := [n for n in batch if n not in on_device]:
                views = [targets.views[n] for n in here]
                units.append(partial(_copy_many, views, [sources[n] for n in here]))
        for done in [self._pool.submit(unit) for unit in units]:
            done.result()

    def forget(self, region: Region) -> None:
        """Drop all views of a region that is about to be closed."""
        self.cuda.forget(region)
        self._bases.pop(region.address, None)
        self._views = {k: v for k, v in self._views.items() if k[1] != region.address}

    def close(self) -> None:
        self._pool.shutdown()
        self._bases.clear()
        self._views.clear()

    def _base(self, region: Region) -> torch.Tensor:
        address = region.address
        if address not in self._bases:
            self._bases[address] = torch.frombuffer(region.view, dtype=torch.uint8)
        return self._bases[address]

    def _targets(self, file: FilePlan, digest: str, region: Region, offset: int) -> Targets:
        key = (digest, region.address, offset, id(file))
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 256:
                self._views.clear()
            found = self._views[key] = targets_of(file, self._base(region), offset)
        return found


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the members of a file go: views of staging memory, and by place the members that are
    copied in pieces and those that are copied many at a time."""

    views: list[torch.Tensor]
    large: list[int]
    small: list[list[int]]


def targets_of(file: FilePlan, base: torch.Tensor, offset: int) -> Targets:
    sizes = [member.item.nbytes for member in file.members]
    small = [n for n, size in enumerate(sizes) if 0 < size < LARGE_BYTES]
    return Targets(
        views=[target_view(base, member, offset) for member in file.members],
        large=[n for n, size in enumerate(sizes) if size >= LARGE_BYTES],
        small=[small[at : at + SMALL_BATCH] for at in range(0, len(small), SMALL_BATCH)],
    )


def target_view(base: torch.Tensor, member: Member, offset: int) -> torch.Tensor:
    """The bytes of a member inside staging memory, seen as a tensor."""
    start = offset + member.offset
    raw = base[start : start + member.item.nbytes]
    return raw.view(getattr(torch, member.item.dtype)).view(member.item.box.lengths)


def _units(
    source: torch.Tensor, target: torch.Tensor, region: Region, offset: int
) -> list[Callable[[], object]]:
    """The copy of one large tensor as pieces that any thread may do."""
    if not is_plain_memory(source):
        return [partial(_copy_many, [target], [source])]
    start, size, address = source.data_ptr(), source.nbytes, region.address + offset

    def move(at: int) -> None:
        ctypes.memmove(address + at, start + at, min(UNIT_BYTES, size - at))

    return [partial(move, at) for at in range(0, size, UNIT_BYTES)]


def _copy_many(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def _yield_to_training() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_NICENESS)
    except OSError:
        pass


def write_header(file: FilePlan, region: Region, offset: int) -> None:
    region.view[offset : offset + file.data_start] = file.header
