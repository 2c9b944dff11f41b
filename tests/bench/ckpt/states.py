"""The states that are saved: a few large tensors, or very many small ones."""

from __future__ import annotations

import torch

SIZES = {
    "big": (200, 2 << 30),
    "mid": (50, 1 << 28),
    "small": (20_000, 20_000 * 4096),
    "small5k": (10_000, 10_000 * 4096),  # 5,000 on each of two ranks
}


def make_state(size: str, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors of equal size; random, so that nothing compresses."""
    count, size_bytes = SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    elements = size_bytes // count // 4
    data = torch.randint(0, 2**30, (count, elements), dtype=torch.int32, generator=generator)
    return {f"layer{i:05d}.weight": row.clone() for i, row in enumerate(data.view(torch.float32))}


def size_bytes(state: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in state.values())


def change(state: dict[str, torch.Tensor]) -> None:
    """Another step of training: every tensor changes, in place."""
    for tensor in state.values():
        tensor.view(torch.int32).add_(1)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a)
