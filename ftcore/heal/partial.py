"""Keep what has arrived when a heal breaks off, for the next heal of the same state.

When a source dies the quorum breaks, and with it the heal; the next quorum is at the same step, so
that what has arrived is still right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ftcore.heal.sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What has to be equal for parts to be the same. No `state_id`: equal to nothing."""

    state_id: str
    layout_hash: int
    part_bytes: int
    in_place: bool


class Partial:
    """Belongs to one live state. Holds nothing but after a heal that broke off."""

    def __init__(self) -> None:
        self._kept: tuple[Identity, list[tuple[int, int]], Sink] | None = None

    @contextmanager
    def sink(self, identity: Identity, tensors: Sequence[Tensor]) -> Iterator[Sink]:
        """Where to receive into `tensors`. It has the parts of a heal of the same state that broke
        off, and is kept when this one does."""
        kept, self._kept = self._kept, None
        if kept is not None and identity.state_id and kept[:2] == (identity, _places(tensors)):
            sink = kept[2]
        else:
            sink = Sink(tensors, identity.part_bytes, identity.in_place)
        try:
            yield sink
        except BaseException:
            self._kept = identity, _places(tensors), sink
            raise


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where the tensors lie and how often they were changed: by nobody but a heal, if equal."""
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
