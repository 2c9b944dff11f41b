"""Decide which parameters share a flat bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

BUCKET_BYTES_MAX = 25 * 2**20  # DistributedDataParallel's default, too
FIRST_BUCKET_BYTES_MAX = 2**20  # small, so that the first reduction starts early in backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter: what is reduced is its local part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    numel: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """The slots that lie one after the other in one flat tensor."""

    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)


def plan_buckets(
    slots: Sequence[Slot], *, bucket_bytes_max: int = BUCKET_BYTES_MAX
) -> tuple[BucketPlan, ...]:
    """Fill buckets from the last parameter to the first: about the order in which gradients come.

    A bucket holds one dtype on one device, and at least one parameter however large it is.
    """
    buckets: list[list[Slot]] = []
    open_buckets: dict[tuple[str, str], list[Slot]] = {}
    for slot in reversed(slots):
        bucket = open_buckets.get((slot.dtype, slot.device))
        first = bucket is None or bucket is buckets[0]
        limit = min(FIRST_BUCKET_BYTES_MAX, bucket_bytes_max) if first else bucket_bytes_max
        if bucket is None or (bucket and _bytes(bucket) + slot.bytes > limit):
            bucket = open_buckets[slot.dtype, slot.device] = []
            buckets.append(bucket)
        bucket.append(slot)
    return tuple(BucketPlan(slots=tuple(bucket)) for bucket in buckets)


def layout_hash(slots: Iterable[Slot]) -> str:
    """The same on two groups exactly when their buckets fit: names, shapes and dtypes in order."""
    digest = sha256()
    for slot in slots:
        digest.update(f"{slot.name}|{slot.shape}|{slot.dtype}\n".encode())
    return digest.hexdigest()


def _bytes(bucket: list[Slot]) -> int:
    return sum(slot.bytes for slot in bucket)
