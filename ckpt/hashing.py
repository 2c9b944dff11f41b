"""Checksums of file images: one xxh3_64 per chunk, and a short name for the whole."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

from ckpt.manifest import CHUNK_BYTES


def chunk_digests(data: memoryview, *, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Digests of consecutive chunks of `data`, 8 bytes little-endian each."""
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, len(data), chunk_bytes)
    numbers = [digest(data[start : start + chunk_bytes]) for start in starts]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def content_name(digests: bytes) -> str:
    """16 hexadecimal digits that name the content of a file."""
    return xxhash.xxh3_64_hexdigest(digests)


def damaged_chunks(data: memoryview, digests: bytes, *, first: int, chunk_bytes: int) -> list[int]:
    """Indices of the chunks in `data` (which starts at chunk `first`) that are not as written."""
    expected = struct.unpack(f"<{len(digests) // 8}Q", digests)
    digest = xxhash.xxh3_64_intdigest
    starts: Iterable[int] = range(0, len(data), chunk_bytes)
    return [
        first + i
        for i, start in enumerate(starts)
        if digest(data[start : start + chunk_bytes]) != expected[first + i]
    ]
