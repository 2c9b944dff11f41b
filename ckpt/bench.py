"""Measure a store as checkpoints use it: small puts, uploads in parts, ranged reads, conditions."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from ckpt.stores import Limits, Store

Opener = Callable[[Limits], Store]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Throughput of one large object with so many connections at a time."""

    connections: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a store can do here and now."""

    url: str
    conditional_put: bool
    detail: str
    size_bytes: int
    small_put_s: float  # median of a 1 KiB put
    small_get_s: float
    rates: tuple[Rate, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure(
    opener: Opener,
    *,
    size_bytes: int,
    connections: tuple[int, ...] = (1, 4, 16),
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Measured:
    """Write and read objects under a key of our own, which is removed again."""
    prefix = f"bench-{secrets.token_hex(6)}"
    data = memoryview(bytearray(os.urandom(1 << 20)) * (size_bytes >> 20))
    into = memoryview(bytearray(len(data)))
    with opener(Limits()) as store:
        capabilities = store.probe()
        put_s, get_s = _small(store, f"{prefix}/small")
        url = store.url
    rates = []
    for count in connections:
        with opener(replace(Limits(), connections_max=count)) as store:
            rates.append(_rate(store, f"{prefix}/large", data, into, count))
        progress(1)
    return Measured(
        url=url,
        conditional_put=capabilities.conditional_put,
        detail=capabilities.detail,
        size_bytes=len(data),
        small_put_s=put_s,
        small_get_s=get_s,
        rates=tuple(rates),
    )


def _small(store: Store, key: str) -> tuple[float, float]:
    try:
        puts = [_seconds(lambda: store.put(key, bytes(1024))) for _ in range(9)]
        gets = [_seconds(lambda: store.get(key)) for _ in range(9)]
    finally:
        store.delete([key])
    return statistics.median(puts), statistics.median(gets)


def _rate(store: Store, key: str, data: memoryview, into: memoryview, connections: int) -> Rate:
    cpu_s = time.process_time()
    try:
        write_s = _seconds(lambda: store.put_large(key, data))
        read_s = _seconds(lambda: store.get_into(key, into))
    finally:
        store.delete([key])
    cpu_s = time.process_time() - cpu_s
    assert into == data, f"{store.url} returned other bytes than were written"
    return Rate(
        connections=connections,
        write_bytes_per_s=len(data) / write_s,
        read_bytes_per_s=len(data) / read_s,
        cpu_s_per_gb=cpu_s / (2 * len(data) / 1e9),
    )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(measured: Measured) -> str:
    """For people."""
    guard = "yes" if measured.conditional_put else "NO: two writers are told apart by looking"
    lines = [
        f"{measured.url}: conditional put {guard} ({measured.detail})",
        f"1 KiB: put {measured.small_put_s * 1e3:.1f} ms, get {measured.small_get_s * 1e3:.1f} ms",
        f"{measured.size_bytes / 1e6:,.0f} MB:  connections  write MB/s  read MB/s  CPU s per GB",
    ]
    for r in measured.rates:
        write, read = r.write_bytes_per_s / 1e6, r.read_bytes_per_s / 1e6
        lines.append(f"{r.connections:>22} {write:>11,.0f} {read:>10,.0f} {r.cpu_s_per_gb:>13.2f}")
    return "\n".join(lines)
