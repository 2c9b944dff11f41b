"""Average gradients with an ordinary all-reduce, weighted by samples: fast, not bit-stable."""

from __future__ import annotations

import torch

from ftcore.process_group.base import Group
from ftcore.process_group.work import GroupWork


def start_reduce_fast(group: Group, flat: torch.Tensor, *, weight: float) -> GroupWork:
    """Replace `flat` by the sum over ranks of weight × flat. The weights of all ranks add up to 1.

    Scaling by ourselves before an ordinary SUM: AVG knows no weights, and gloo has no PREMUL_SUM.
    A rank that brings nothing has weight 0; what its buffer held, even nan, is not used.
    """
    if weight == 0.0:
        flat.zero_()
    elif weight != 1.0:
        flat.mul_(weight)
    return group.allreduce([flat])


def weight_of(samples: int, *, samples_total: int) -> float:
    """The share of this rank: its mean gradient counts as often as it saw samples."""
    return samples / samples_total
