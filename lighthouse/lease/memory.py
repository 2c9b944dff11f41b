"""A lease inside one process: for a lone lighthouse, for tests and for the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from lighthouse.lease.api import Clock, Grant, Holder, Timing, monotonic_s, new_identity
from lighthouse.lease.errors import LeaseLost


@dataclass(slots=True)
class MemoryStore:
    """What candidates of one process share. It judges the lease's end by its own clock."""

    clock: Clock = monotonic_s
    term: int = 0
    holder: Holder | None = None
    ends_at: float = 0.0
    records: dict[str, bytes] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def current(self) -> Holder | None:
        return self.holder if self.clock() < self.ends_at else None

    def require(self, grant: Grant) -> None:
        holder = self.current()
        if holder is None or holder.term != grant.term:
            raise LeaseLost(f"term {grant.term} has ended", term=grant.term, newest=self.term)


class MemoryLease:
    """One candidate of a MemoryStore."""

    def __init__(
        self, store: MemoryStore, *, timing: Timing, identity: str = "", clock: Clock = monotonic_s
    ) -> None:
        self.timing = timing
        self.identity = identity or new_identity()
        self._store, self._clock = store, clock

    async def acquire(self, address: str, *, term_min: int = 1) -> Grant | Holder:
        store, asked_at = self._store, self._clock()
        async with store.changed:
            holder = store.current()
            if holder is not None and holder.identity != self.identity:
                return holder
            store.term = max(store.term + 1, term_min)
            store.holder = Holder(term=store.term, identity=self.identity, address=address)
            store.ends_at = store.clock() + self.timing.ttl_s
            store.changed.notify_all()
            return Grant(
                term=store.term,
                valid_until=self.timing.tenure_end(asked_at),
                identity=self.identity,
                address=address,
            )

    async def renew(self, grant: Grant) -> Grant:
        asked_at = self._clock()
        self._store.require(grant)
        self._store.ends_at = self._store.clock() + self.timing.ttl_s
        return replace(grant, valid_until=self.timing.tenure_end(asked_at))

    async def release(self, grant: Grant) -> None:
        store = self._store
        async with store.changed:
            if store.holder is not None and store.holder.term == grant.term:
                store.holder = None
                store.changed.notify_all()

    async def watch(self) -> AsyncIterator[Holder | None]:
        store, shown = self._store, False
        seen: Holder | None = None
        while True:
            async with store.changed:
                now = store.current()
                if shown and now == seen:
                    try:
                        async with asyncio.timeout(self.timing.renew_every_s):
                            await store.changed.wait()
                    except TimeoutError:
                        pass
                    continue
            seen, shown = now, True
            yield now

    async def write(self, grant: Grant, job: str, record: bytes | None) -> None:
        self._store.require(grant)
        if record is None:
            self._store.records.pop(job, None)
        else:
            self._store.records[job] = record

    async def read(self) -> dict[str, bytes]:
        return dict(self._store.records)

    async def close(self) -> None:
        pass
