"""The arithmetic of uploads in parts, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Set

from ckpt.stores.errors import StoreError


def part_count(size_bytes: int, part_bytes: int) -> int:
    """An empty object has no parts.

    >>> [part_count(n, 4) for n in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-size_bytes // part_bytes)


def part_size(index: int, part_bytes: int, size_bytes: int) -> int:
    """
    >>> [part_size(i, 4, 5) for i in (0, 1)]
    [4, 1]
    """
    return min(part_bytes, size_bytes - index * part_bytes)


def check_part(key: str, index: int, given: int, part_bytes: int, size_bytes: int) -> None:
    """Raise unless part `index` of an object of `size_bytes` may have `given` bytes."""
    count = part_count(size_bytes, part_bytes)
    if not 0 <= index < count or given != part_size(index, part_bytes, size_bytes):
        raise StoreError(
            f"part {index} of {key} has {given:,} bytes; the object was announced with "
            f"{size_bytes:,} bytes in {count} parts of {part_bytes:,}",
            remedy="This is a fault of the caller: send each part whole, the last one shorter.",
        )


def check_whole(key: str, sent: Set[int], part_bytes: int, size_bytes: int) -> None:
    """Raise unless every part was sent: an object with a hole is never published."""
    missing = set(range(part_count(size_bytes, part_bytes))) - sent
    if missing:
        raise StoreError(
            f"{len(missing)} parts of {key} were never sent, the first is {min(missing)}",
            remedy="This is a fault of the caller: send all parts before finish().",
        )


def upload_part_bytes(size_bytes: int, *, part_bytes: int, parts_max: int, least: int) -> int:
    """The part size for an object: as asked, but within what the store allows.

    >>> upload_part_bytes(10**12, part_bytes=16 << 20, parts_max=10_000, least=5 << 20) >> 20
    96
    """
    smallest = max(part_bytes, least, -(-size_bytes // parts_max))
    return -(-smallest // (1 << 20)) * (1 << 20)
