"""Decide which connection asks for which part, so that slow sources hold up nobody.

No threads, no clock: the receiver calls it under its lock with the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Taken:
    """A part that a connection has asked for."""

    connection: int
    source: int
    since: float


@dataclass(slots=True)
class Work:
    """The parts still to come. Parts are counted from 0 to `count` - 1."""

    count: int
    done: int = 0  # as bits
    _pending: deque[int] = field(default_factory=deque)
    _taken: dict[int, Taken] = field(default_factory=dict)
    _gone: dict[int, set[int]] = field(default_factory=dict)  # source → parts it has no more
    _seconds: list[float] = field(default_factory=list)  # how long parts took

    def __post_init__(self) -> None:
        self._pending.extend(i for i in range(self.count) if not self.done >> i & 1)

    @property
    def is_finished(self) -> bool:
        return self.done == (1 << self.count) - 1

    def take(self, connection: int, source: int, now: float) -> int | None:
        """The next part for this connection, or None when it can have none now."""
        gone = self._gone.get(source, set())
        for _ in range(len(self._pending)):
            part = self._pending.popleft()
            if part in gone:
                self._pending.append(part)
                continue
            self._taken[part] = Taken(connection, source, now)
            return part
        return None

    def finish(self, part: int, now: float) -> None:
        """The part has arrived and its checksum was right."""
        taken = self._taken.pop(part)
        self._seconds.append(now - taken.since)
        self.done |= 1 << part

    def give_back(self, parts: Iterable[int]) -> None:
        """The connection broke or the bytes were damaged: somebody else's turn, and soon."""
        for part in parts:
            del self._taken[part]
            self._pending.appendleft(part)

    def lack(self, part: int, source: int) -> None:
        """The source has dropped this part: it is for the others."""
        self._gone.setdefault(source, set()).add(part)
        self.give_back([part])

    def is_hopeless(self, sources: Iterable[int]) -> bool:
        """True when a part can be had from none of these sources any more."""
        lacking = [self._gone.get(source, set()) for source in sources]
        if not lacking:
            return not self.is_finished
        return bool(
            set.intersection(*lacking) - {p for p in range(self.count) if self.done >> p & 1}
        )

    def late(self, now: float, *, patience_s: float = 0.25, factor: float = 5.0) -> set[int]:
        """Connections that hold up the end: nothing is left to take, and their part has taken
        `factor` times what parts usually take."""
        if self._pending or not self._seconds:
            return set()
        limit = max(patience_s, factor * median(self._seconds))
        return {t.connection for t in self._taken.values() if now - t.since > limit}
