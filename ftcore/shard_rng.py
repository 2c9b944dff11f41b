"""Random numbers that depend on (seed, step, shard) alone, whoever computes the shard."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_for(seed: int, *, step: int, shard: int) -> int:
    """A 63-bit seed; equal triples give equal seeds, others unrelated ones."""
    digest = hashlib.blake2b(f"{seed}/{step}/{shard}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, *, step: int, shard: int) -> Iterator[None]:
    """Inside, torch (CPU and CUDA), random and numpy draw this shard's numbers."""
    number = seed_for(seed, step=step, shard=shard)
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    yield
