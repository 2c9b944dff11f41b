"""Seed all random generators for one shard of one step, and restore them afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ftcore.data.seeds import seed_for


@contextmanager
def shard_rng(seed: int, step: int, shard: int = 0) -> Iterator[int]:
    """Inside, torch (CPU and the current CUDA device), numpy and `random` are seeded with
    `seed_for(seed, step, shard)`, which is also what `with … as` gives. The state of all of them
    is restored, so nothing outside depends on what a shard drew."""
    with seeded(seed_for(seed, step, shard)) as derived:
        yield derived


@contextmanager
def seeded(seed: int) -> Iterator[int]:
    """The same with a seed that is derived already."""
    # Asking for CUDA would start it, which a worker process of a data loader must not do.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            yield seed
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
