"""Fingerprint tensors where they lie, to compare the state of replica groups.

For silent corruption, not against malice: any single changed bit changes the digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch
import xxhash

from ftcore.reduce.gradients import local_part, plain_parts

_CHUNK_BYTES = 2**24  # bounds the int64 copies below to eight times this
_PERIOD = 65521  # prime, so that no layout of rows repeats its weights in step


def state_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hex digest of names and bits: of memory by XXH3 in place, of a GPU's by sums there,
    of which two numbers per chunk leave it. Compare digests of one kind of device only."""
    digest, sums = sha256(), []
    for name, tensor in tensors:
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}\n".encode())
        for part in plain_parts(local_part(tensor)):
            if part.device.type == "cpu":
                digest.update(_hash(part.detach()))
            else:
                sums += _sums(part.detach())
    if sums:
        digest.update(str(torch.stack([s.cpu() for s in sums]).tolist()).encode())
    return digest.hexdigest()


def _hash(tensor: torch.Tensor) -> bytes:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_digest(memoryview(raw.numpy()))


def _sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Sums modulo 2**64 over the bytes' words: plain, and weighted by position."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    found = []
    for start in range(0, raw.numel(), _CHUNK_BYTES):
        words = _words(raw[start : start + _CHUNK_BYTES]).to(torch.int64)
        weights = torch.arange(words.numel(), device=words.device) % _PERIOD + 1
        found += [words.sum(), (words * weights).sum()]
    return found


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Four bytes at a time where possible."""
    aligned = raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0
    return raw.view(torch.int32) if aligned else raw
