"""Decide how long to wait before the next try."""

from __future__ import annotations

import random
from collections.abc import Iterator


def backoff(
    rng: random.Random, *, first_s: float = 0.05, max_s: float = 2.0, factor: float = 2.0
) -> Iterator[float]:
    """Yield waits in seconds, for ever: exponential with full jitter over the upper half.

    Source: "Exponential Backoff and Jitter", AWS Architecture Blog, 2015. The lower half is kept
    so that a lone client never spins.
    """
    ceiling_s = first_s
    while True:
        yield ceiling_s * rng.uniform(0.5, 1.0)
        ceiling_s = min(max_s, ceiling_s * factor)
