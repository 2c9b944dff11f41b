"""A lease in a directory: for several lighthouses of one host, or of one coherent file system.

Every change appends to a chain of files (`lighthouse.lease.chain`), which no stopped or killed
process can block. What it needs from a shared file system: `link` that creates or fails, and a
directory listing that shows what another host created before (ext4, xfs and tmpfs of one host;
Lustre, GPFS and CephFS across hosts; NFS only with `lookupcache=none,noac`). The kernel of the
holder's own host also tells the others at once when its process has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lighthouse.lease.api import (
    RECORD_BYTES_MAX,
    Clock,
    Grant,
    Holder,
    Timing,
    monotonic_s,
    new_identity,
)
from lighthouse.lease.chain import Chain, Entry
from lighthouse.lease.errors import LeaseLost, LeaseUnreachable, RecordTooLarge
from lighthouse.lease.observe import Sighting

T = TypeVar("T")
POLL_S = 0.05  # inotify does not see changes made by other hosts


class FileLease:
    """One candidate of the lease kept in the directory `path`."""

    def __init__(
        self, path: Path, *, timing: Timing, identity: str = "", clock: Clock = monotonic_s
    ) -> None:
        self.timing = timing
        self.identity = identity or new_identity()
        self._chain, self._clock, self._host = Chain(path), clock, _host()
        self._sighting = Sighting()
        self._alive: int | None = None
        self._one_at_a_time = asyncio.Lock()  # our own appends must not conflict with each other

    async def acquire(self, address: str, *, term_min: int = 1) -> Grant | Holder:
        return await self._in_thread(lambda: self._acquire(address, term_min))

    async def renew(self, grant: Grant) -> Grant:
        asked_at = self._clock()
        await self._in_thread(lambda: self._change(grant, lambda entry: entry, synced=False))
        return replace(grant, valid_until=self.timing.tenure_end(asked_at))

    async def release(self, grant: Grant) -> None:
        try:
            await self._in_thread(
                lambda: self._change(
                    grant, lambda e: Entry(term=e.term, records=e.records, anchor=e.anchor)
                )
            )
        except LeaseLost:
            pass
        self._hide_alive()

    async def watch(self) -> AsyncIterator[Holder | None]:
        shown, seen = False, None
        while True:
            try:
                now = await self._on_thread(lambda: self._living_holder(self._chain.newest()))
            except LeaseUnreachable:
                await asyncio.sleep(self.timing.renew_every_s)
                continue
            if not shown or now != seen:
                shown, seen = True, now
                yield now
            await asyncio.sleep(POLL_S)

    async def write(self, grant: Grant, job: str, record: bytes | None) -> None:
        if record is not None and len(record) > RECORD_BYTES_MAX:
            raise RecordTooLarge(f"the record of job {job} has {len(record)} bytes", job=job)
        await self._in_thread(lambda: self._write(grant, job, record))

    async def read(self) -> dict[str, bytes]:
        return await self._in_thread(self._read)

    async def close(self) -> None:
        self._hide_alive()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._one_at_a_time:
            return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """On a thread, because a shared file system may block."""
        try:
            return await asyncio.to_thread(work)
        except (OSError, ValueError, KeyError) as error:
            what = f"the lease directory {self._chain.path} cannot be used: {error}"
            raise LeaseUnreachable(what, path=str(self._chain.path)) from error

    def _acquire(self, address: str, term_min: int) -> Grant | Holder:
        base = self._chain.newest()
        holder = self._living_holder(base)
        if holder is not None and holder.identity != self.identity:
            return holder
        asked_at = self._clock()
        term = max(base.term + 1, term_min)
        self._show_alive(term)
        taken = replace(base, term=term, identity=self.identity, address=address, host=self._host)
        if self._chain.try_append(base, taken) is None:
            self._hide_alive()
            return self._who_was_faster()
        self._clean_up(taken)
        return Grant(
            term=term,
            valid_until=self.timing.tenure_end(asked_at),
            identity=self.identity,
            address=address,
        )

    def _who_was_faster(self) -> Holder:
        holder = self._chain.newest()
        if not holder.identity or holder.identity == self.identity:
            raise LeaseUnreachable("the lease changed hands while it was acquired")
        return _holder(holder)

    def _change(
        self, grant: Grant, change: Callable[[Entry], Entry], *, synced: bool = True
    ) -> Entry:
        """Append a changed state while this tenure is the newest. Returns the state before."""
        base = self._chain.newest()
        if (base.term, base.identity) != (grant.term, self.identity):
            raise LeaseLost(f"term {grant.term} has ended", term=grant.term, newest=base.term)
        if self._chain.try_append(base, change(base), synced=synced) is None:
            raise LeaseLost(f"term {grant.term} has ended", term=grant.term)
        return base

    def _write(self, grant: Grant, job: str, record: bytes | None) -> None:
        name = f"record-{grant.term}-{secrets.token_hex(8)}"
        if record is not None:
            self._chain.write(name, record)

        def change(entry: Entry) -> Entry:
            others = {j: n for j, n in entry.records.items() if j != job}
            return replace(entry, records=others if record is None else {**others, job: name})

        before = self._change(grant, change)
        if job in before.records:
            (self._chain.path / before.records[job]).unlink(missing_ok=True)

    def _read(self) -> dict[str, bytes]:
        while True:
            entry = self._chain.newest()
            try:
                return {j: (self._chain.path / n).read_bytes() for j, n in entry.records.items()}
            except FileNotFoundError:
                if self._chain.newest().number == entry.number:
                    raise

    def _clean_up(self, taken: Entry) -> None:
        """Remove what earlier terms left behind. No later state can name it any more."""
        for path in self._chain.path.glob("record-*"):
            if (
                int(path.name.split("-")[1]) < taken.term
                and path.name not in taken.records.values()
            ):
                path.unlink(missing_ok=True)
        for path in self._chain.path.glob("alive-*"):
            if int(path.name.split("-")[1]) < taken.term:
                path.unlink(missing_ok=True)

    def _living_holder(self, entry: Entry) -> Holder | None:
        now = self._clock()
        self._sighting = self._sighting.look(entry.number, now)
        gone = not entry.identity or self._sighting.is_over(self.timing, now)
        return None if gone or self._is_dead(entry) else _holder(entry)

    def _is_dead(self, entry: Entry) -> bool:
        """Whether the holder's process ended, which the kernel of the same host knows at once."""
        if entry.host != self._host or entry.identity == self.identity:
            return False
        try:
            fd = os.open(self._chain.path / f"alive-{entry.term}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def _show_alive(self, term: int) -> None:
        """Hold a shared lock while this process lives: who gets an exclusive one knows it died."""
        self._hide_alive()
        self._chain.path.mkdir(parents=True, exist_ok=True)
        path = self._chain.path / f"alive-{term}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._alive = fd

    def _hide_alive(self) -> None:
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None


def _holder(entry: Entry) -> Holder:
    return Holder(term=entry.term, identity=entry.identity, address=entry.address)


def _host() -> str:
    """This boot of this machine: flock says who is dead only within one kernel."""
    return socket.gethostname() + "/" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
