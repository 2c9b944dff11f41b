"""Work for a core that takes as long as it is wanted to, when nothing else runs."""

import time

import torch


def multiply(times):
    a = torch.ones(256, 256)
    for _ in range(times):
        a @ a


def calibrate(times=100, tries=5):
    """Seconds that one product takes on a core of its own: the best of some tries."""
    return min(_timed(times) for _ in range(tries)) / times


def _timed(times):
    began = time.perf_counter()
    multiply(times)
    return time.perf_counter() - began
