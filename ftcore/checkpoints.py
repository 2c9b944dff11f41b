"""Save committed steps of a job, and begin where the newest complete one ended.

The checkpointer is any object with these methods; `ckpt.Checkpointer` is one. All members of a
quorum save the same steps together, each its part, under an id that all of them work out alike.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch.distributed as dist

from ftcore.base.errors import BadSetting, FtError
from ftcore.base.log import event
from ftcore.live_state import LiveState
from ftcore.settings import Place
from ftcore.statedict import per_rank
from ftcore.wire.messages import Quorum

log = logging.getLogger("ftcore")

_SHARED = {"model", "optimizer", "ftcore", "data"}  # equal on all ranks, or sharded by DTensors


class Handle(Protocol):
    @property
    def error(self) -> FtError | None: ...
    @property
    def is_durable(self) -> bool: ...
    def wait_durable(self, timeout_s: float | None = None) -> object: ...


class Checkpointer(Protocol):
    """What a manager needs of one."""

    @property
    def urls(self) -> tuple[str, ...]: ...
    def sit(self, seat: str, *, rank: int, ranks: int, store: Any = None) -> None: ...
    def join(self, session: str, *, group: int, groups: int, gone: Iterable[int] = ()) -> None: ...
    def restore(self, state: Mapping[str, Any]) -> int | None: ...
    def save(self, state: Mapping[str, Any], *, step: int, alone: bool = False) -> Handle: ...
    def close(self, *, keep_memory: bool = False) -> None: ...


class JobCheckpoints:
    """The checkpoints of one rank of one replica group. Step S is the state after S steps."""

    def __init__(
        self, checkpointer: Checkpointer, *, every: int, state: LiveState, place: Place
    ) -> None:
        if every < 1:
            raise BadSetting(
                f"checkpoint_every is {every}", remedy="Save every so many steps, at least each."
            )
        self._checkpointer, self._every = checkpointer, every
        self._state, self._place = state, place
        self._quorum: Quorum | None = None
        self._latest: Handle | None = None
        self._saved = -1

    def __str__(self) -> str:
        return f"every {self._every} to {' '.join(self._checkpointer.urls)}"

    def begin(self, store: dist.Store | None) -> None:
        """Restore the newest complete step, if there is one. `store` is that of the ranks."""
        place = self._place
        seat = f"{place.replica_id}/{place.rank}"
        self._checkpointer.sit(seat, rank=place.rank, ranks=place.ranks, store=store)
        began = time.perf_counter()
        step = self._checkpointer.restore(self._tree())
        if step is not None:
            self._saved = step
            event(log, "checkpoint.restored", step=step, seconds=time.perf_counter() - began)

    def quorum_changed(self, quorum: Quorum) -> None:
        """Save with the members of `quorum` from now on."""
        gone = _gone(self._quorum, quorum) if self._quorum is not None else ()
        self._quorum = quorum
        self._checkpointer.join(
            session_of(self._place.job, quorum),
            group=quorum.replica_ids.index(self._place.replica_id),
            groups=len(quorum.members),
            gone=gone,
        )

    def step_ended(self, *, until: int) -> None:
        """Save if this step is one to be saved; the last one always is. Called on the training
        thread, after the optimizer has stepped."""
        step = self._state.committed
        if step % self._every == 0 or step >= until:
            self._save(step, alone=False)

    def save_within(self, seconds: float) -> bool:
        """This group is about to be taken away, perhaps with all others: save what it has now, by
        itself, and wait for that as long as there is time. Return whether it is durable; what is
        not is still uploaded by the checkpointer's own process, if that lives longer."""
        deadline = time.monotonic() + seconds
        step = self._state.committed
        if step != self._saved:
            self._save(step, alone=True)
        is_durable = self._wait(deadline)
        event(log, "checkpoint.noticed", step=step, durable=is_durable)
        return is_durable

    def _wait(self, deadline: float) -> bool:
        if self._latest is None:
            return self._saved == self._state.committed  # just restored
        try:
            self._latest.wait_durable(max(0.0, deadline - time.monotonic()))
        except (FtError, TimeoutError) as error:
            event(log, "checkpoint.late", level=logging.WARNING, reason=str(error))
        return self._latest.is_durable

    def _save(self, step: int, *, alone: bool) -> None:
        """A save that fails is told, and costs training nothing."""
        if self._latest is not None and self._latest.error is not None:
            self._tell(self._saved, self._latest.error)
        try:
            self._latest = self._checkpointer.save(self._tree(), step=step, alone=alone)
        except FtError as error:
            self._tell(step, error)
        else:
            self._saved = step
            event(log, "checkpoint.saved", step=step)

    def _tell(self, step: int, error: FtError) -> None:
        event(log, "checkpoint.failed", level=logging.WARNING, step=step, reason=str(error))

    def _tree(self) -> dict[str, object]:
        """The state that heals. With several ranks, what the user registered is each rank's own."""
        tree = self._state.tree
        if self._place.ranks == 1:
            return dict(tree)
        return {n: v if n in _SHARED else per_rank(v) for n, v in tree.items()}

    def close(self, *, keep_memory: bool) -> None:
        """Wait until all that was saved is durable or has failed, and release the checkpointer;
        for a quick restart with `keep_memory`."""
        self._checkpointer.close(keep_memory=keep_memory)


def session_of(job: str, quorum: Quorum) -> str:
    """An id of the groups that save together: equal on all members, and never used again."""
    text = repr((job, quorum.quorum_id, sorted(quorum.lives)))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _gone(old: Quorum, new: Quorum) -> tuple[int, ...]:
    """Groups of `old` that complete no step of it any more: lost, or behind and healing."""
    return tuple(
        place
        for place, member in enumerate(old.members)
        if member.life not in new.lives or member.replica_id in new.healing
    )
