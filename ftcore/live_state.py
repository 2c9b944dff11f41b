"""The state of one rank that heals and is offered for heals: model, optimizer, position, more."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ftcore.base.errors import FtError
from ftcore.crew import Crew
from ftcore.flight import FlightRecord
from ftcore.heal import HealFailed, HealProgress, HealServer, Offer, Partial, heal
from ftcore.heal.compare import fetch_layout
from ftcore.link import Grant
from ftcore.statedict import StatePair, first_difference, layout
from ftcore.step import Times

TELL_EVERY_S = 0.25  # how far a heal is; half of the time between two heartbeats
USUAL_STEPS = 9  # whose reductions show how long one usually takes


class LiveState:
    """Owns what a joiner has to copy, and how far this rank is.

    committed: steps committed so far. lineage: the quorum of the last of them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        host: str,
        heal_timeout_s: float,
        bandwidth_max: float | None = None,
    ) -> None:
        self.committed = 0
        self.lineage = 0
        self.layout_hash = ""
        self._heal_timeout_s = heal_timeout_s
        self._server = HealServer(host, bandwidth_max=bandwidth_max)
        self._record = self._server.record = FlightRecord()
        self._partial = Partial()
        self._reductions_s: deque[float] = deque(maxlen=USUAL_STEPS)
        position = StatePair(self._get_position, self._set_position)
        self.tree: dict[str, object] = {
            "model": model,
            "optimizer": optimizer,
            "ftcore": position,
        }
        optimizer.register_step_pre_hook(lambda *_: self.before_update())

    @property
    def address(self) -> str:
        return self._server.address

    def register(self, name: str, get: Callable[[], object], set: Callable[[Any], None]) -> None:
        self.tree[name] = StatePair(get, set)

    def ready(self) -> None:
        """All state is registered: from now on its layout is what groups compare."""
        self._server.layout = layout(self.tree).static
        self.layout_hash = f"{self._server.layout.hash:016x}"

    def difference_from(self, address: str) -> str:
        """What differs first from the state of the group with this heal server; may be empty."""
        try:
            theirs = fetch_layout(address)
        except (FtError, OSError):
            return ""
        assert self._server.layout is not None
        return first_difference(self._server.layout, theirs, names=("this group", address)) or ""

    def offer(self, grant: Grant, crew: Crew) -> float:
        """Publish this state for those who heal in this quorum. Returns seconds it took here.

        Called on the training thread at a step boundary, because hooks of a module may reshard
        parameters that a forward on another thread uses.
        """
        began = time.perf_counter()
        quorum = grant.quorum
        offer = self._server.publish(
            self.tree,
            step=grant.step,
            quorum_id=quorum.quorum_id,
            readers=len(quorum.healing),
            state_id=f"{self.committed}.{self.lineage}" if self.lineage else "",
        )
        me = crew.group.rank()
        crew.store(quorum, timeout_s=10.0).set(f"offer/{me}", json.dumps(offer.to_json()))
        return time.perf_counter() - began

    def held_s(self, times: Times) -> float:
        """How long the heals of others held this step: what was done for them, and how much longer
        than usual its reduction took, since that waits for those who heal."""
        if not times.export_s:
            self._reductions_s.append(times.reduce_s)
            return 0.0
        usual_s = median(self._reductions_s) if self._reductions_s else 0.0
        return times.export_s + max(0.0, times.reduce_s - usual_s)

    def heal(self, grant: Grant, crew: Crew, *, tell: Callable[[int, int], None]) -> float:
        """Copy the state of the sources into this one, in place. Returns seconds it took.

        `tell` hears how many bytes are done, of how many. Ends with the crew's error when the
        quorum breaks, and with HealFailed when the sources cannot deliver.
        """
        began = time.perf_counter()
        quorum = grant.quorum
        store = crew.store(quorum, timeout_s=10.0)
        ranks = [quorum.members.index(source) for source in quorum.sources]
        deadline = began + self._heal_timeout_s
        offers = [_wait_offer(store, rank, crew, deadline) for rank in ranks]
        is_of_value = self.committed > 0  # then a heal that breaks off must leave it whole
        heal(
            offers,
            into=self.tree,
            in_place=not is_of_value,
            deadline_s=self._heal_timeout_s,
            progress=_Watch(crew, tell),
            partial=self._partial,
        )
        assert self.committed == grant.step
        return time.perf_counter() - began

    def commit(self, step: int, *, lineage: int) -> None:
        self.committed, self.lineage = step + 1, lineage
        self._record.warm_soon()

    def attempt_failed(self) -> None:
        self._server.retire()

    def close(self) -> None:
        self._record.close()
        self._server.close()

    def before_update(self) -> None:
        """What joiners have not read yet is copied aside before the optimizer overwrites it."""
        self._server.gate()

    def _get_position(self) -> object:
        return {"committed": self.committed, "lineage": self.lineage}

    def _set_position(self, position: Any) -> None:
        self.committed, self.lineage = int(position["committed"]), int(position["lineage"])


class _Watch:
    """Looks at a heal while it runs, on the training thread."""

    def __init__(self, crew: Crew, tell: Callable[[int, int], None]) -> None:
        self._crew, self._tell, self._due_s = crew, tell, 0.0

    def __call__(self, progress: HealProgress) -> None:
        if error := self._crew.error:
            raise error
        if progress.seconds >= self._due_s:
            self._due_s = progress.seconds + TELL_EVERY_S
            self._tell(progress.bytes_done, progress.bytes_total)


def _wait_offer(store: dist.Store, rank: int, crew: Crew, deadline: float) -> Offer:
    """The offer of one source; it comes when that source stands at the boundary, too."""
    key = f"offer/{rank}"
    while not store.check([key]):
        if error := crew.error:
            raise error
        if time.perf_counter() > deadline:
            raise HealFailed(f"replica rank {rank} did not offer its state in time")
        time.sleep(0.002)
    return Offer.from_json(json.loads(store.get(key)))
