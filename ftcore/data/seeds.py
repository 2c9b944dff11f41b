"""Derive seeds from (seed, step, shard), equal on every machine and for every number of groups."""

from __future__ import annotations

import hashlib


def seed_for(seed: int, step: int, shard: int = 0) -> int:
    """A seed of 63 bits for the random numbers of one shard in one step."""
    return derive(b"step", seed, step, shard) >> 1


def derive(purpose: bytes, *numbers: int) -> int:
    """64 bits that depend on all numbers and the purpose (BLAKE2b, RFC 7693)."""
    text = purpose + b"".join(b":%d" % number for number in numbers)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
