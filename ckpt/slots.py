"""The trainer's staging memory: slots that hold whole steps, or cells for one wave of files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.errors import SaveFailed, StateTooLarge
from ckpt.plan import ALIGN, Layout
from ckpt.region import Region

CELLS_PER_SLOT = 4


@dataclass(slots=True)
class Slot:
    """One region and who uses it: the save that was copied into it, until its uploads end."""

    number: int
    region: Region | None = None
    save_id: int = 0  # 0 when free
    headers: str = ""  # digest of the layout whose headers are in place


@dataclass(slots=True)
class Slots:
    """At most `count` slots of at most `bytes_max` together."""

    count: int
    bytes_max: int | None
    on_region: Callable[[Slot], None]
    on_drop: Callable[[Region], None]
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = [Slot(number) for number in range(self.count)]

    @property
    def slot_bytes_max(self) -> int | None:
        return None if self.bytes_max is None else self.bytes_max // self.count

    @property
    def has_free(self) -> bool:
        with self._changed:
            return any(not s.save_id for s in self._slots)

    def acquire(self, save_id: int, *, stop: Callable[[], bool]) -> Slot | None:
        """Wait for a free slot, the one used longest ago. None when `stop` says so."""
        with self._changed:
            self._changed.wait_for(lambda: stop() or any(not s.save_id for s in self._slots))
            free = [s for s in self._slots if not s.save_id]
            if not free:
                return None
            slot = free[0]
            self._slots.remove(slot)
            self._slots.append(slot)
            slot.save_id = save_id
            return slot

    def fit(self, slot: Slot, size: int) -> Region:
        """Make the memory of `slot` at least `size` bytes; what is there and large enough stays."""
        if self.slot_bytes_max is not None and size > self.slot_bytes_max:
            raise StateTooLarge(
                f"one slot needs {size} bytes, staging_bytes_max allows {self.slot_bytes_max}"
            )
        if slot.region is None or slot.region.size < size:
            if slot.region is not None:
                self.on_drop(slot.region)
                slot.region.close()
            slot.region, slot.headers = Region.create(size), ""
            slot.region.prefault()
            self.on_region(slot)
        return slot.region

    def adopt(self, number: int, region: Region) -> bool:
        """Take over memory of an earlier life of this trainer."""
        if number >= len(self._slots) or self._slots[number].region is not None:
            return False
        self._slots[number].region = region
        return True

    def release(self, number: int, save_id: int) -> None:
        with self._changed:
            for slot in self._slots:
                if slot.number == number and slot.save_id == save_id:
                    slot.save_id = 0
            self._changed.notify_all()

    def release_except(self, save_ids: set[int]) -> None:
        """Free the slots of saves that nobody will free any more."""
        with self._changed:
            for slot in self._slots:
                if slot.save_id > 0 and slot.save_id not in save_ids:
                    slot.save_id = 0
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def regions(self) -> list[Slot]:
        return [s for s in self._slots if s.region is not None]

    def close(self) -> None:
        for slot in self.regions():
            assert slot.region is not None
            self.on_drop(slot.region)
            slot.region.close()


class Resident:
    """All files of a layout at once in one region."""

    def __init__(self, layout: Layout, region: Region) -> None:
        self._offsets = layout.pool_offsets
        self._region = region

    def begin(self, number: int, size: int) -> tuple[Region, int]:
        return self._region, self._offsets[number]


class Wave:
    """A region as a few cells, each for one file until it is written everywhere."""

    def __init__(self, region: Region, cell_bytes: int) -> None:
        self._region, self._cell_bytes = region, cell_bytes
        self._changed = threading.Condition()
        self._free = list(range(region.size // cell_bytes))
        self._cell_of: dict[int, int] = {}
        self._is_stopped = False

    def begin(self, number: int, size: int) -> tuple[Region, int]:
        if size > self._cell_bytes:
            raise StateTooLarge(f"a file of {size} bytes does not fit into {self._cell_bytes}")
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_stopped)
            if self._is_stopped:
                raise SaveFailed("the daemon died while the state was copied to it in waves")
            cell = self._free.pop()
            self._cell_of[number] = cell
        return self._region, cell * self._cell_bytes

    def written(self, number: int) -> None:
        """The file is at every destination, or will not get there: its cell is free."""
        with self._changed:
            cell = self._cell_of.pop(number, None)
            if cell is not None:
                self._free.append(cell)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


def cell_bytes(budget: int) -> int:
    """The size of one cell of a slot of `budget` bytes."""
    return budget // CELLS_PER_SLOT // ALIGN * ALIGN


def file_bytes_for_waves(budget: int) -> int:
    """Tensors in a file so that it fits into a cell with its header and padding."""
    room = cell_bytes(budget)
    return max(room - room // 8 - 4 * ALIGN, ALIGN)
