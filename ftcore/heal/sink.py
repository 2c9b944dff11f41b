"""Where received bytes go: straight into the live tensors, or aside until they may."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ftcore.heal.parts import Part, cut
from ftcore.statedict import bytes_of
from ftcore.statedict.memory import copy_in, is_plain_memory


class Sink:
    """The memory of a heal, by parts.

    A tensor whose bytes lie in order in host memory is received into directly. Any other (on a
    device, with strides, or all of them when not `in_place`) has a buffer, which is made when its
    first bytes come and copied and freed by `copy_completed` when its last have come.
    """

    def __init__(self, tensors: Sequence[Tensor], part_bytes: int, in_place: bool) -> None:
        self._tensors = tensors
        self._in_place = in_place
        sizes = [t.numel() * t.element_size() for t in tensors]
        self.total = sum(sizes)
        self.parts = cut(sizes, part_bytes)
        self.bytes_done = 0
        self.parts_done = 0  # as bits
        self.is_written = False
        self._missing = sizes
        self._direct = [in_place and is_plain_memory(t) for t in tensors]
        self._buffers: dict[int, Tensor] = {}
        self._completed: list[int] = []
        self._lock = threading.Lock()

    def views(self, part: Part) -> list[memoryview]:
        """Where to receive this part."""
        self.is_written = self.is_written or self._in_place
        return [self._bytes(s.tensor)[s.start : s.end] for s in part.segments]

    def done(self, part: Part) -> None:
        """The part has arrived and is right."""
        with self._lock:
            self.bytes_done += part.nbytes
            self.parts_done |= 1 << part.index
            for segment in part.segments:
                self._missing[segment.tensor] -= segment.end - segment.start
                if not self._missing[segment.tensor] and not self._direct[segment.tensor]:
                    self._completed.append(segment.tensor)

    def copy_completed(self) -> None:
        """Copy complete buffered tensors into place, on the calling thread."""
        if not self._in_place:
            return
        with self._lock:
            completed, self._completed = self._completed, []
        for tensor in completed:
            copy_in(self._buffers.pop(tensor), self._tensors[tensor])

    def finish(self) -> None:
        """All parts have arrived: copy what is still aside."""
        self._in_place = True
        self.copy_completed()

    def _bytes(self, tensor: int) -> memoryview:
        if self._direct[tensor]:
            return bytes_of(self._tensors[tensor])
        with self._lock:
            if tensor not in self._buffers:
                live = self._tensors[tensor]
                size = live.numel() * live.element_size()
                pinned = live.device.type == "cuda"
                self._buffers[tensor] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            return bytes_of(self._buffers[tensor])
