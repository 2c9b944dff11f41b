"""One line on the terminal of somebody who watches: bytes, rate, and what became durable."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

UPDATE_S = 0.1


def size_text(nbytes: float) -> str:
    """`1.5 GB`: decimal, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


class ProgressLine:
    """Counts bytes from any thread and redraws at most ten times a second. Silent unless shown."""

    def __init__(self, *, show: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._show = self._stream.isatty() if show is None else show
        self._lock = threading.Lock()
        self.start("")

    def start(self, label: str) -> None:
        """Begin to count from zero."""
        self._label, self._bytes = label, 0
        self._started = self._drawn = time.monotonic()

    def add(self, nbytes: int) -> None:
        """`nbytes` more were moved."""
        with self._lock:
            self._bytes += nbytes
            now = time.monotonic()
            if not self._show or now - self._drawn < UPDATE_S:
                return
            self._drawn = now
            rate = size_text(self._bytes / max(now - self._started, 1e-9))
            self._stream.write(f"\r{self._label}: {size_text(self._bytes)} at {rate}/s \x1b[K")
            self._stream.flush()

    def say(self, text: str) -> None:
        """Finish the line with `text`."""
        if self._show:
            with self._lock:
                self._stream.write(f"\r{text}\x1b[K\n")
                self._stream.flush()


def durable_text(step: int, facts: Mapping[str, Any]) -> str:
    rate = size_text(facts["bytes"] / max(facts["seconds"], 1e-9))
    size = size_text(facts["bytes"])
    return f"step {step}: {size} at {facts['url']} in {facts['seconds']:.2f} s ({rate}/s)"
