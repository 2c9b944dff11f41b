"""Hold a state as it was at one step boundary while the trainer goes on, copying little.

Parameters and optimizer state change in the optimizer step only. So they are not copied at the
boundary: readers are sent the live memory until the trainer comes to its next optimizer step and
calls `settle`, which copies what no reader has yet. Everything else (buffers, generators, what
users register) may change at any moment and is copied at once; it is small.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ftcore.base.log import event
from ftcore.heal.manifest import encode_manifest
from ftcore.heal.parts import Part, cut, part_bytes_for
from ftcore.heal.staging import Staging
from ftcore.statedict import FlatState, bytes_of
from ftcore.statedict.memory import copy_out

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Reader:
    """One receiver, over however many connections."""

    have: int = 0  # bit i: part i has arrived there, from whatever source
    connections: int = 0
    is_done: bool = False

    @property
    def is_gone(self) -> bool:
        return self.is_done or self.connections == 0


@dataclass(slots=True)
class _PartState:
    """Where the bytes of a part are: in the trainer's memory, copied, or nowhere any more.

    `lock` is held while they are sent or copied, so that nobody looks at live memory once
    `settle` has returned.
    """

    live: list[Tensor] | None  # bytes of the trainer, on any device
    views: list[memoryview] | None  # what can be sent
    lock: threading.Lock = field(default_factory=threading.Lock)


class Snapshot:
    """The state of one step, for readers. Made, settled and revoked on the training thread."""

    def __init__(
        self,
        flat: FlatState,
        staging: Staging,
        *,
        step: int,
        quorum_id: int,
        readers: int,
        stage_ahead: bool,
    ) -> None:
        self.step, self.quorum_id = step, quorum_id
        own = [t for t in flat.tensors if t.entry.alias_of is None]
        self._moving = [t for t in own if t.is_parameter or t.entry.lazy]
        private = [t for t in own if not (t.is_parameter or t.entry.lazy)]
        self._written = _events({t.tensor.device for t in self._moving})
        self._versions = [_version(t.tensor) for t in self._moving]
        self._readers_expected = readers
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Condition()
        self.is_settled = False
        self._is_settling = self._is_invalid = self._is_revoked = False
        sizes = [t.entry.nbytes for t in self._moving]
        part_bytes = part_bytes_for(sum(sizes))
        self.parts = cut(sizes, part_bytes)
        self._memory = staging.memory(sum(sizes))
        self._states = self._first_states(sizes)
        self.manifest = encode_manifest(flat, self._moving, private, part_bytes)
        self._ahead = threading.Thread(target=self._stage_ahead, name="ft-stage", daemon=True)
        if stage_ahead or any(t.tensor.device.type != "cpu" for t in self._moving):
            self._ahead.start()

    def _first_states(self, sizes: Sequence[int]) -> list[_PartState]:
        """Live memory where bytes lie in order. What has holes or other strides is copied now."""
        sources: list[tuple[Tensor, bool]] = []
        offset = 0
        for named, size in zip(self._moving, sizes, strict=True):
            live = _bytes_in_order(named.tensor)
            if live is None:
                copied = self._memory[offset : offset + size]
                copy_out(named.tensor, copied)
                sources.append((copied, False))
            else:
                sources.append((live, True))
            offset += size
        return [_first_state(part, sources) for part in self.parts]

    # Readers, on threads of the server.

    @contextmanager
    def connected(self, reader_id: str) -> Iterator[Reader]:
        """One connection of the reader of that id."""
        with self._lock:
            reader = self._readers.setdefault(reader_id, Reader())
            reader.connections += 1
        try:
            yield reader
        finally:
            with self._lock:
                reader.connections -= 1
                self._lock.notify_all()

    def read(self, index: int, use: Callable[[Sequence[memoryview]], int]) -> int | None:
        """Call `use` with the views of part `index` while they cannot change; None if dropped."""
        if self._is_settling:
            time.sleep(0.001)  # locks are not fair: let the trainer have this one
        state = self._states[index]
        with state.lock:
            if state.views is None and state.live is not None:
                self._copy(state, self.parts[index])
            return None if state.views is None else use(state.views)

    def is_intact(self) -> bool:
        """False once live memory was changed without `settle`: what was sent may be torn."""
        if not self.is_settled and not self._is_invalid:
            self._check_versions(range(len(self._moving)))
        return not self._is_invalid

    def is_wanted(self) -> bool:
        """True while an expected reader has not come or not finished."""
        with self._lock:
            return self._is_wanted()

    def wait_served(self, timeout_s: float) -> bool:
        """Wait until `is_wanted` is false; False when the time ran out."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._is_wanted(), timeout=timeout_s)

    def _is_wanted(self) -> bool:
        return len(self._readers) < self._readers_expected or any(
            not reader.is_gone for reader in self._readers.values()
        )

    # The training thread.

    def settle(self, *, threads: int) -> int:
        """Copy all that a reader may still need; return the bytes copied. Afterwards the trainer
        may change its state. Called again it does nothing."""
        if self.is_settled:
            return 0
        self.is_intact()
        self._is_settling = True
        had = self._had_by_all()
        work = deque(part for part in self.parts if self._states[part.index].live is not None)
        copied: list[int] = []

        def copy() -> None:
            with suppress(IndexError):
                while True:
                    part = work.popleft()
                    unwanted = bool(had >> part.index & 1) or self._is_invalid
                    copied.append(self._drop(part) if unwanted else self._stage(part))

        _in_threads(copy, min(threads, len(work)))
        self.is_settled, self._is_settling = True, False
        return sum(copied)

    def revoke(self) -> None:
        """End it: no memory of the trainer is looked at after this returns."""
        self._is_revoked = True
        for part in self.parts:
            self._drop(part)
        if self._ahead.is_alive():
            self._ahead.join()

    def _had_by_all(self) -> int:
        """The parts that every reader has. One that has not come, or went too early, has none."""
        with self._lock:
            here = [r for r in self._readers.values() if r.is_done or r.connections]
            if len(here) < self._readers_expected:
                return 0
            everything = (1 << len(self.parts)) - 1
            for reader in here:
                everything &= everything if reader.is_done else reader.have
            return everything

    def _stage(self, part: Part) -> int:
        state = self._states[part.index]
        with state.lock:
            if state.live is None:
                return 0
            self._copy(state, part)
        if not self.is_settled:
            self._check_versions({segment.tensor for segment in part.segments})
        return part.nbytes

    def _copy(self, state: _PartState, part: Part) -> None:
        """Copy a part into its place in the staging memory. The caller holds its lock."""
        assert state.live is not None, "a part is copied once"
        offset = part.offset
        for source in state.live:
            target = self._memory[offset : offset + len(source)]
            _copy_bytes(source, target, self._written)
            offset += len(source)
        state.live, state.views = None, [bytes_of(self._memory[part.offset : offset])]

    def _drop(self, part: Part) -> int:
        state = self._states[part.index]
        with state.lock:
            state.live = state.views = None
        return 0

    def _stage_ahead(self) -> None:
        """Copy from the end while readers take from the front: `settle` finds little left."""
        for part in reversed(self.parts):
            if self.is_settled or self._is_revoked:
                return
            if not self._had_by_all() >> part.index & 1:
                self._stage(part)

    def _check_versions(self, tensors: Iterable[int]) -> None:
        for i in tensors:
            if _version(self._moving[i].tensor) != self._versions[i] and not self._is_invalid:
                if self.is_settled:  # meanwhile, and before the change: it was allowed
                    return
                self._is_invalid = True
                event(
                    log,
                    "heal.state_changed",
                    level=logging.ERROR,
                    tensor=self._moving[i].name,
                    step=self.step,
                    remedy="call gate() before the optimizer step",
                )


def _bytes_in_order(tensor: Tensor) -> Tensor | None:
    """The bytes of a tensor as they lie in memory, if that is their logical order."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0).byte()


def _first_state(part: Part, sources: Sequence[tuple[Tensor, bool]]) -> _PartState:
    pieces = [sources[s.tensor][0][s.start : s.end] for s in part.segments]
    on_host = all(piece.device.type == "cpu" for piece in pieces)
    is_live = any(sources[s.tensor][1] for s in part.segments)
    return _PartState(
        live=pieces if is_live else None,
        views=[bytes_of(piece) for piece in pieces] if on_host else None,
    )


def _events(devices: set[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """For each device an event after which the state is complete: the last step may still run."""
    events = {}
    for device in devices:
        if device.type == "cuda":
            events[device] = torch.cuda.current_stream(device).record_event()
    return events


def _copy_bytes(
    source: Tensor, target: Tensor, written: Mapping[torch.device, torch.cuda.Event]
) -> None:
    """Copy to host memory. From a device through a stream of our own, so that the copy does not
    wait for what the trainer queues, and through a small pinned buffer, one part at a time."""
    if source.device.type != "cuda":
        if source.data_ptr() != target.data_ptr():  # copied at publish already: it is in its place
            target.copy_(source)
        return
    stream = _streams.get(source.device)
    stream.wait_event(written[source.device])
    with torch.cuda.stream(stream):
        pinned = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        pinned.copy_(source, non_blocking=True)
    stream.synchronize()
    target.copy_(pinned)


class _Streams(threading.local):
    """One side stream for each thread and device."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, torch.cuda.Stream] = {}

    def get(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._by_device:
            self._by_device[device] = torch.cuda.Stream(device)
        return self._by_device[device]


_streams = _Streams()


def _version(tensor: Tensor) -> int:
    """Counts in-place changes; a detached alias shares the counter of its parameter."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _in_threads(work: Callable[[], None], count: int) -> None:
    helpers = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
