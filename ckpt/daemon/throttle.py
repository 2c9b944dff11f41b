"""Hold uploads to a configured rate, and the daemon below the trainer's priority."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator

_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_BEST_EFFORT_LOWEST = (2 << 13) | 7


class Throttle:
    """Lets `bytes_per_s` through, with a tenth of a second of burst. Zero means no limit."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be sent."""
        if self.bytes_per_s <= 0:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now - 0.1)
            self._free_at = start + nbytes / self.bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


class Turns:
    """One save at a time for each participant, in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: dict[tuple[str, str], int] = {}
        self._serving: dict[tuple[str, str], int] = {}

    def ticket(self, run: str, seat: str) -> int:
        with self._changed:
            number = self._next.get((run, seat), 0)
            self._next[run, seat] = number + 1
            return number

    @contextlib.contextmanager
    def take(self, run: str, seat: str, ticket: int) -> Iterator[None]:
        """Wait for the turn of `ticket`, and give it on when the block ends."""
        key = (run, seat)
        with self._changed:
            self._changed.wait_for(lambda: self._serving.get(key, 0) == ticket)
        try:
            yield
        finally:
            with self._changed:
                self._serving[key] = ticket + 1
                self._changed.notify_all()


def lower_priority(niceness: int) -> None:
    """Yield processor and disk to the trainer. Only the trainer's speed depends on it."""
    try:
        os.nice(niceness)
    except OSError:
        pass
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_BEST_EFFORT_LOWEST)
