"""The memory tier: which step lies staged in which shared memory of this host."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ckpt.plan import Layout
from ckpt.region import Region


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
    index: int
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
        self._lock = threading.Lock()
        self._slots: dict[tuple[str, int, int], Slot] = {}
        self._owners: dict[tuple[str, int], object] = {}

    def put(self, slot: Slot) -> None:
        with self._lock:
            old = self._slots.get((slot.run, slot.index, slot.number))
            self._slots[slot.run, slot.index, slot.number] = slot
        if old is not None:
            old.drop()

    def get(self, run: str, index: int, number: int) -> Slot:
        with self._lock:
            return self._slots[run, index, number]

    def slots(self, run: str, index: int | None = None) -> list[Slot]:
        """The slots of a run, of one participant or of all on this host, by number."""
        with self._lock:
            found = [s for s in self._slots.values() if s.run == run]
        return sorted(
            (s for s in found if index is None or s.index == index),
            key=lambda s: (s.index, s.number),
        )

    def own(self, run: str, index: int, owner: object) -> None:
        """`owner` uses the slots of a participant from now on; an earlier owner may not drop them
        any more."""
        with self._lock:
            self._owners[run, index] = owner

    def drop(self, run: str, index: int, owner: object) -> None:
        """Forget and free what a participant staged, except what is still being uploaded."""
        with self._lock:
            if self._owners.get((run, index)) is not owner:
                return
            keys = [k for k, s in self._slots.items() if (s.run, s.index) == (run, index)]
            gone = [self._slots.pop(k) for k in keys]
        for slot in gone:
            slot.drop()

    def held_bytes(self) -> int:
        with self._lock:
            return sum(s.region.size for s in self._slots.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._slots)
