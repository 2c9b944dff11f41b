"""The memory tier: which step lies staged in which shared memory of this host."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ckpt.plan import Layout
from ckpt.region import Region

# A trainer that was killed is noticed by its closed socket, at latest a moment after its next life
# has come.
LEAVE_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One participant's part of one step, complete in memory."""

    run: str
    step: int
    attempt: str
    index: int
    count: int
    layout: Layout
    plain: str
    metrics: dict[str, float] = field(default_factory=dict)
    digests: tuple[bytes, ...] = ()  # of each file's chunks, where the copy may have travelled


@dataclass(slots=True)
class Slot:
    """One region of staging memory and what is in it."""

    run: str
    seat: str
    number: int
    region: Region
    held: Held | None = None
    busy: int = 0  # uploads that still read it
    is_dropped: bool = False  # the last upload closes it

    def release(self) -> None:
        """One upload less reads this slot."""
        self.busy -= 1
        if self.is_dropped and not self.busy:
            self.region.close()

    def drop(self) -> None:
        self.held, self.is_dropped = None, True
        if not self.busy:
            self.region.close()


class MemoryTier:
    """All slots of this host. A slot stops holding its step before the next copy into it begins."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._slots: dict[tuple[str, str, int], Slot] = {}
        self._owners: dict[tuple[str, str], object] = {}

    def put(self, slot: Slot, *, owner: object = None) -> None:
        """Let the slot be found, in the place of an older one, unless the seat is taken by now."""
        with self._lock:
            if self._owners.get((slot.run, slot.seat)) is not owner:
                return
            old = self._slots.get((slot.run, slot.seat, slot.number))
            self._slots[slot.run, slot.seat, slot.number] = slot
        if old is not None:
            old.drop()

    def slots(self, run: str, seat: str | None = None) -> list[Slot]:
        """The slots of a run, of one seat or of all on this host, by number."""
        with self._lock:
            found = [s for s in self._slots.values() if s.run == run]
        return sorted(
            (s for s in found if seat is None or s.seat == seat), key=lambda s: (s.seat, s.number)
        )

    def own(self, run: str, seat: str, owner: object) -> list[Slot]:
        """`owner` has this seat from now on; return the slots that it may go on with. There are
        none when somebody lives there: two trainers in one memory would tear what both save, so
        the slots stay with the other one and are not found here any more."""
        with self._lock:
            is_free = self._lock.wait_for(
                lambda: self._owners.get((run, seat)) in (None, owner), LEAVE_TIMEOUT_S
            )
            lives_on = not is_free
            self._owners[run, seat] = owner
            keys = [k for k, s in self._slots.items() if (s.run, s.seat) == (run, seat)]
            found = [self._slots.pop(k) if lives_on else self._slots[k] for k in sorted(keys)]
        return [] if lives_on else found

    def leave(self, run: str, seat: str, owner: object, *, keep: bool) -> bool:
        """`owner` is gone. Its slots stay for its next life with `keep`, or are freed once they
        are uploaded. Returns False when another trainer took the seat: the slots are not here."""
        with self._lock:
            if self._owners.get((run, seat)) is not owner:
                return False
            del self._owners[run, seat]
            self._lock.notify_all()
            keys = [k for k, s in self._slots.items() if (s.run, s.seat) == (run, seat)]
            gone = [] if keep else [self._slots.pop(k) for k in keys]
        for slot in gone:
            slot.drop()
        return True

    def held_bytes(self) -> int:
        with self._lock:
            return sum(s.region.size for s in self._slots.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._slots)
