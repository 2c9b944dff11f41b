"""Let the ranks of one group agree when they start: on a session, and on the step to restore.

Uses the key-value store of the process group, never a collective; saves do not come here.
"""

from __future__ import annotations

import json
import secrets
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from ckpt.capture import Place


class Meeting(Protocol):
    """What ranks tell each other, in rounds that all of them run through alike."""

    def session(self) -> str: ...

    def exchange(self, mine: Any) -> list[Any]:
        """Give `mine` (JSON), get what every rank gave, in order of ranks."""


class Alone:
    """A group of one rank."""

    def __init__(self) -> None:
        self._session = secrets.token_hex(4)

    def session(self) -> str:
        return self._session

    def exchange(self, mine: Any) -> list[Any]:
        return [mine]


class ThroughStore:
    """Ranks that share a `torch.distributed` store."""

    def __init__(self, store: Any, place: Place, *, timeout_s: float = 300.0) -> None:
        self._place = place
        self._store = dist.PrefixStore("ckpt", store)
        self._timeout = timedelta(seconds=timeout_s)
        self._prefix = ""
        self._round = 0

    def session(self) -> str:
        """One id for all ranks; each Checkpointer of the same process group gets another."""
        number = int(self._store.add(f"opened/{self._place.rank}", 1))
        key = f"session/{number}"
        if self._place.rank == 0:
            self._store.set(key, secrets.token_hex(4))
        self._store.wait([key], self._timeout)
        session: str = self._store.get(key).decode()
        self._prefix = f"{session}/"
        return session

    def exchange(self, mine: Any) -> list[Any]:
        self._round += 1
        base = f"{self._prefix}round/{self._round}/"
        self._store.set(f"{base}{self._place.rank}", json.dumps(mine))
        keys = [f"{base}{rank}" for rank in range(self._place.ranks)]
        self._store.wait(keys, self._timeout)
        return [json.loads(self._store.get(key)) for key in keys]


def default_place() -> Place:
    """The rank of this process as torch.distributed knows it, or alone."""
    if dist.is_available() and dist.is_initialized():
        return Place(rank=dist.get_rank(), ranks=dist.get_world_size())
    return Place()


def default_meeting(place: Place) -> Meeting:
    has_store = place.ranks > 1 and dist.is_available() and dist.is_initialized()
    return meeting_of(place, dist.distributed_c10d._get_default_store() if has_store else None)


def meeting_of(place: Place, store: Any) -> Meeting:
    """Where the ranks of one group meet: a `torch.distributed` store, if there are several."""
    return ThroughStore(store, place) if place.ranks > 1 and store is not None else Alone()
