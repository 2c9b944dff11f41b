"""A lease in a directory: for several lighthouses of one host, or of one coherent file system.

Every change happens under a short exclusive flock and is published by rename, so a reader never
sees half of one and two writers never interleave. The kernel drops the lock of a dead process. A
process stopped (SIGSTOP) in the milliseconds inside the lock blocks the election until it goes on
or is killed: safe, but without a leader. A shared file system must have coherent flock and rename
(ext4, xfs, tmpfs on one host; NFS version 4, Lustre with -o flock, GPFS across hosts).
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lighthouse.lease.api import (
    RECORD_BYTES_MAX,
    Clock,
    Grant,
    Holder,
    Timing,
    monotonic_s,
    new_identity,
)
from lighthouse.lease.errors import LeaseLost, LeaseUnreachable, RecordTooLarge
from lighthouse.lease.observe import Sighting

T = TypeVar("T")
POLL_S = 0.05  # inotify does not see changes made by other hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The content of `holder.json`. An empty identity means that nobody holds the lease."""

    term: int = 0
    identity: str = ""
    address: str = ""
    beat: int = 0
    host: str = ""

    @property
    def holder(self) -> Holder | None:
        if not self.identity:
            return None
        return Holder(term=self.term, identity=self.identity, address=self.address)


class FileLease:
    """One candidate of the lease kept in the directory `path`."""

    def __init__(
        self, path: Path, *, timing: Timing, identity: str = "", clock: Clock = monotonic_s
    ) -> None:
        self.timing = timing
        self.identity = identity or new_identity()
        self._path, self._clock, self._host = path, clock, _host()
        self._sighting = Sighting()
        self._alive: int | None = None

    async def acquire(self, address: str, *, term_min: int = 1) -> Grant | Holder:
        return await self._in_thread(lambda: self._acquire(address, term_min))

    def _acquire(self, address: str, term_min: int) -> Grant | Holder:
        asked_at = self._clock()
        with self._locked():
            state = self._load()
            holder = self._living_holder(state)
            if holder is not None and holder.identity != self.identity:
                return holder
            term = max(state.term + 1, term_min)
            self._show_alive(term)
            taken = _State(term=term, identity=self.identity, address=address, host=self._host)
            self._store("holder.json", vars_of(taken))
            (self._path / f"alive-{state.term}").unlink(missing_ok=True)
        return Grant(
            term=term,
            valid_until=self.timing.tenure_end(asked_at),
            identity=self.identity,
            address=address,
        )

    async def renew(self, grant: Grant) -> Grant:
        return await self._in_thread(lambda: self._renew(grant))

    def _renew(self, grant: Grant) -> Grant:
        asked_at = self._clock()
        with self._locked():
            state = self._require(grant)
            self._store("holder.json", vars_of(replace(state, beat=state.beat + 1)), durable=False)
        return replace(grant, valid_until=self.timing.tenure_end(asked_at))

    async def release(self, grant: Grant) -> None:
        await self._in_thread(lambda: self._release(grant))

    def _release(self, grant: Grant) -> None:
        with self._locked():
            state = self._load()
            if (state.term, state.identity) == (grant.term, self.identity):
                self._store("holder.json", vars_of(_State(term=state.term)))
        self._hide_alive()

    async def watch(self) -> AsyncIterator[Holder | None]:
        shown, seen = False, None
        while True:
            now = await self._in_thread(lambda: self._living_holder(self._load()))
            if not shown or now != seen:
                shown, seen = True, now
                yield now
            await asyncio.sleep(POLL_S)

    async def write(self, grant: Grant, job: str, record: bytes | None) -> None:
        if record is not None and len(record) > RECORD_BYTES_MAX:
            raise RecordTooLarge(f"the record of job {job} has {len(record)} bytes", job=job)
        await self._in_thread(lambda: self._write(grant, job, record))

    def _write(self, grant: Grant, job: str, record: bytes | None) -> None:
        name = "job-" + hashlib.sha256(job.encode()).hexdigest()[:40] + ".json"
        with self._locked():
            self._require(grant)
            if record is None:
                (self._path / name).unlink(missing_ok=True)
                return
            self._store(name, {"job": job, "record": base64.b64encode(record).decode()})

    async def read(self) -> dict[str, bytes]:
        return await self._in_thread(self._read)

    def _read(self) -> dict[str, bytes]:
        with self._locked():
            files = [json.loads(p.read_bytes()) for p in self._path.glob("job-*.json")]
        return {f["job"]: base64.b64decode(f["record"]) for f in files}

    async def close(self) -> None:
        self._hide_alive()

    # What follows runs on a thread, because a shared file system may block.

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except (OSError, ValueError, KeyError) as error:
            what = f"the lease directory {self._path} cannot be used: {error}"
            raise LeaseUnreachable(what, path=str(self._path)) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = self._clock() + self.timing.try_timeout_s
            while not _try_flock(fd):
                if self._clock() > deadline:
                    raise TimeoutError("another process keeps the lock")
                time.sleep(0.002)
            yield
        finally:
            os.close(fd)

    def _load(self) -> _State:
        try:
            return _State(**json.loads((self._path / "holder.json").read_bytes()))
        except FileNotFoundError:
            return _State()
        except TypeError as error:
            raise ValueError(f"holder.json is not ours: {error}") from error

    def _store(self, name: str, content: dict[str, Any], *, durable: bool = True) -> None:
        temporary = self._path / f".{name}.tmp"
        with open(temporary, "w") as file:
            json.dump(content, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, self._path / name)
        if durable:
            _fsync_directory(self._path)

    def _require(self, grant: Grant) -> _State:
        state = self._load()
        if (state.term, state.identity) != (grant.term, self.identity):
            raise LeaseLost(f"term {grant.term} has ended", term=grant.term, newest=state.term)
        return state

    def _living_holder(self, state: _State) -> Holder | None:
        now = self._clock()
        self._sighting = self._sighting.look(state, now)
        if self._sighting.is_over(self.timing, now) or self._is_dead(state):
            return None
        return state.holder

    def _is_dead(self, state: _State) -> bool:
        """Whether the holder's process ended, which the kernel of the same host knows at once."""
        if not state.identity or state.host != self._host or state.identity == self.identity:
            return False
        try:
            fd = os.open(self._path / f"alive-{state.term}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return _try_flock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def _show_alive(self, term: int) -> None:
        self._hide_alive()
        name = self._path / f"alive-{term}"
        self._alive = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _hide_alive(self) -> None:
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None


def vars_of(state: _State) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _State.__slots__}


def _try_flock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _host() -> str:
    """This boot of this machine: flock says who is dead only within one kernel."""
    return socket.gethostname() + "/" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
