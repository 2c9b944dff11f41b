"""Bring checked bytes to a GPU through small page-locked buffers, by several threads.

A copy from pageable memory reaches a quarter of the link's rate; page-locking the source itself
takes longer than the copy. So each thread moves bytes into one of its two buffers while the device
reads the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ckpt.pinned import PinnedMemory

BUFFER_BYTES = 8 << 20
THREADS_MAX = 12


class Part(NamedTuple):
    """Bytes at a host address and where they go, a flat uint8 view on a device."""

    source: int
    target: torch.Tensor


def parts_of(flat: torch.Tensor, source: int) -> Iterator[Part]:
    """Bytes on a device cut to what a buffer holds."""
    for at in range(0, flat.numel(), BUFFER_BYTES):
        yield Part(source + at, flat[at : at + BUFFER_BYTES])


def can_take(tensor: torch.Tensor) -> bool:
    """Whether the bytes of the tensor are its values, in order, on a GPU."""
    return tensor.is_cuda and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def fill_devices(parts: Sequence[Part]) -> None:
    """Copy all parts and wait for them. What the current streams still do with the targets ends
    before."""
    if not parts:
        return
    for device in {p.target.device for p in parts}:
        torch.cuda.current_stream(device).synchronize()
    work: queue.SimpleQueue[Part] = queue.SimpleQueue()
    for part in parts:
        work.put(part)
    nbytes = sum(p.target.numel() for p in parts)
    threads = min(THREADS_MAX, os.cpu_count() or 1, -(-nbytes // BUFFER_BYTES))
    with (
        PinnedMemory(threads * 2 * BUFFER_BYTES) as memory,
        ThreadPoolExecutor(threads, "ckpt-fill") as pool,
    ):
        buffers = memory.tensor.view(threads, 2, BUFFER_BYTES)
        for done in [pool.submit(_send_all, work, pair) for pair in buffers]:
            done.result()


def _send_all(work: queue.SimpleQueue[Part], buffers: torch.Tensor) -> None:
    lanes: dict[torch.device, Lane] = {}
    with contextlib.suppress(queue.Empty), torch.no_grad():
        while True:
            part = work.get_nowait()
            device = part.target.device
            if device not in lanes:
                for other in lanes.values():
                    other.stream.synchronize()  # the buffers change hands
                lanes = {device: Lane(buffers, device)}
            lanes[device].send(part)
    for lane in lanes.values():
        lane.stream.synchronize()


class Lane:
    """One thread's way to a device: parts fill up a buffer, then the other one takes its turn."""

    def __init__(self, buffers: torch.Tensor, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._buffers = buffers
        self._read: list[Any] = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._turn = self._used = 0

    def send(self, part: Part) -> None:
        nbytes = part.target.numel()
        if self._used + nbytes > BUFFER_BYTES:
            self._read[self._turn].record(self.stream)
            self._turn, self._used = 1 - self._turn, 0
            self._read[self._turn].synchronize()
        place = self._buffers[self._turn][self._used : self._used + nbytes]
        ctypes.memmove(place.data_ptr(), part.source, nbytes)
        with torch.cuda.stream(self.stream):
            part.target.copy_(place, non_blocking=True)
        self._used += nbytes
