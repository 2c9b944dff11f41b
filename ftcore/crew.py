"""The process group across replica groups: built for each quorum, aborted when a member is lost."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from ftcore.names import crew_name
from ftcore.process_group.base import Group
from ftcore.process_group.errors import GroupError
from ftcore.process_group.store import connect_store
from ftcore.settings import Place
from ftcore.wire.messages import Quorum

_TRY_S = 1.0


class Crew:
    """Holds the group and knows for which quorum it is. `abort` may come from any thread, also
    before the quorum that it speaks of is built: it is remembered."""

    def __init__(self, group: Group, *, place: Place, timeout_s: float):
        self.group = group
        self.quorum: Quorum | None = None
        self.built_s = 0.0
        self._job, self._replica_id, self._rank = place.job, place.replica_id, place.rank
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._building_id = 0
        self._aborted: dict[int, str] = {}

    def build(self, quorum: Quorum) -> None:
        """Make the group that of `quorum`. Raises a GroupError, retryable."""
        with self._lock:
            self._building_id = quorum.quorum_id
            aborted = self._aborted.get(quorum.quorum_id)
        if aborted is None:
            self._configure(quorum)
            with self._lock:
                aborted = self._aborted.get(quorum.quorum_id)
        if aborted is not None:
            self.group.abort(aborted)

    def _configure(self, quorum: Quorum) -> None:
        if self.quorum is not None and self.quorum.quorum_id == quorum.quorum_id:
            return
        began = time.perf_counter()
        self.quorum = None
        self.group.configure(
            store_address=quorum.sources[0].store_address,
            prefix=self._prefix(quorum),
            rank=quorum.replica_ids.index(self._replica_id),
            world_size=len(quorum.members),
            timeout_s=self.timeout_s,
        )
        self.quorum = quorum
        self.built_s = time.perf_counter() - began

    def store(self, quorum: Quorum, *, timeout_s: float) -> dist.Store:
        """A key-value store that all members of `quorum` see, for this rank."""
        client = self._connect(quorum.sources[0].store_address, timeout_s)
        client.set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore(self._prefix(quorum) + "/values", client)

    def _connect(self, address: str, timeout_s: float) -> dist.TCPStore:
        """In short tries: torch's client does not hear that its host was lost meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return connect_store(address, timeout_s=min(timeout_s, _TRY_S))
            except dist.DistError:
                if (error := self.error) is not None:
                    raise error from None
                if time.monotonic() > deadline:
                    raise

    def meet(self, *, timeout_s: float) -> None:
        """Wait until all members are here, or one is lost, or `timeout_s` is over.

        Called after the last step: a member that leaves earlier would break the reduction that
        another one has not quite ended.
        """
        quorum = self.quorum
        if quorum is None or len(quorum.members) == 1:
            return
        deadline = time.monotonic() + timeout_s
        keys = [f"done/{rank}" for rank in range(len(quorum.members))]
        try:
            store = self.store(quorum, timeout_s=timeout_s)
            store.set(keys[self.group.rank()], "")
            while self.error is None and time.monotonic() < deadline and not store.check(keys):
                time.sleep(0.002)
        except (dist.DistError, RuntimeError):
            return  # the member that hosts the store saw everybody, and left

    def _prefix(self, quorum: Quorum) -> str:
        return crew_name(self._job, quorum.quorum_id, self._rank)

    def abort(self, quorum_id: int, reason: str) -> None:
        """End what waits in this quorum's group; 0 means whatever it is."""
        with self._lock:
            if quorum_id:
                self._aborted = {quorum_id: reason}
            is_now = quorum_id in (0, self._building_id)
        if is_now:
            self.group.abort(reason)

    @property
    def error(self) -> GroupError | None:
        return self.group.error()
