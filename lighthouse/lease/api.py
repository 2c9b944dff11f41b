"""What a lease promises: one leader at a time, terms that only grow, writes by the leader only."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

Clock = Callable[[], float]
RECORD_BYTES_MAX = 1 << 20  # etcd refuses requests over 1.5 MiB


def monotonic_s() -> float:
    """Seconds on a clock that only goes forward, also while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def new_identity() -> str:
    """A name for one life of one candidate: a restarted process is somebody else."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a lease lasts, and what follows from that.

    A clock may run fast or slow by the share `drift`. The holder counts from before it asked and
    stops early enough for a slow clock here and a fast one there: (1 - 2d) / (1 - d) real seconds
    are never more than 1 / (1 + d). Everyone else counts from after it saw a sign of life.
    """

    ttl_s: float = 2.0
    drift: float = 0.05

    @property
    def renew_every_s(self) -> float:
        return self.ttl_s / 4

    @property
    def try_timeout_s(self) -> float:
        """How long one endpoint may keep us waiting before the next one is asked."""
        return self.ttl_s / 5

    def tenure_end(self, asked_at: float) -> float:
        """When the holder must have stopped, on its own clock."""
        return asked_at + self.ttl_s * (1 - 2 * self.drift)

    def is_over(self, *, seen_at: float, now: float) -> bool:
        """Whether a holder last seen alive at `seen_at` has stopped for certain."""
        return now - seen_at >= self.ttl_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One tenure. `fence` is what the store compares when this tenure writes."""

    term: int
    valid_until: float
    identity: str
    address: str
    fence: int = 0
    session: int = 0

    def is_valid(self, now: float) -> bool:
        return now < self.valid_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who leads, as everybody else sees it."""

    term: int
    identity: str
    address: str


class Lease(Protocol):
    """One candidate's handle on the lease. Any method raises LeaseUnreachable if the store is away.

    Guarantees, whatever the backend (one conformance suite holds them):
    - at most one Grant is valid at any time, as long as clocks drift less than `timing.drift`;
    - each acquisition has a higher term than every one before it;
    - a write succeeds only while this grant is the newest one, whatever the clocks say;
    - `read` returns every write that succeeded before it was called.
    """

    timing: Timing
    identity: str

    async def acquire(self, address: str, *, term_min: int = 1) -> Grant | Holder:
        """Try once. The new term is at least `term_min`. Returns the holder if there is one."""
        ...

    async def renew(self, grant: Grant) -> Grant:
        """Extend the tenure. Raises LeaseLost when it has ended."""
        ...

    async def release(self, grant: Grant) -> None:
        """End the tenure now, so that another candidate need not wait. Does nothing if it ended."""
        ...

    def watch(self) -> AsyncIterator[Holder | None]:
        """Yield the holder, now and at each change, for ever. None: anybody may acquire."""
        ...

    async def write(self, grant: Grant, job: str, record: bytes | None) -> None:
        """Make the record of `job` durable (None: remove it). Raises LeaseLost, RecordTooLarge."""
        ...

    async def read(self) -> dict[str, bytes]:
        """All records by job."""
        ...

    async def close(self) -> None: ...
