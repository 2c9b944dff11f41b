"""A process group across replica groups that is rebuilt for each quorum and aborted in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcore.base.errors import BadSetting
from ftcore.process_group.errors import (
    GroupAborted,
    GroupError,
    GroupNotBuilt,
    GroupNotConfigured,
)
from ftcore.process_group.life import Life, Link, build_in_background, drop_in_background
from ftcore.process_group.solo import SoloLink
from ftcore.process_group.store import split_address
from ftcore.process_group.work import GroupWork, ThenWork, joined, reason

_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """What a group needs to know of a quorum."""

    store_address: str
    prefix: str
    rank: int
    world_size: int
    timeout_s: float


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """What every group promises, whatever carries its bytes.

    - `configure()` builds it for a new quorum; the group before is aborted and dies in the
      background. It returns when all members are connected, or raises a GroupError.
    - `abort()` may be called from any thread. It ends every wait of this group, and a configure()
      that still runs, within milliseconds, even when a peer is only stopped.
    - A collective never raises a bare RuntimeError: its Work's wait() raises a GroupError.
      From the first error to the next configure() all collectives fail with that error.
    - With `hold_errors`, wait() returns as if all were well and only `error()` tells, so that code
      that cannot stop in the middle, like FSDP2's backward, reaches the end of the step. The
      tensors hold garbage then: look at `error()` before using them.

    It is a torch ProcessGroup: `dist.all_reduce(tensor, group=group)` works.
    """

    backend_name = "abstract"
    group_name = ""  # given by registry.register(); hides torch's, which lives in its backends

    def __init__(self, *, hold_errors: bool = False) -> None:
        super().__init__(0, 1)
        self.hold_errors = hold_errors
        self.group_name = ""
        self._life = Life("group that was never configured")
        self._quorum: Quorum | None = None
        self._threads: list[threading.Thread] = []

    # -- life ---------------------------------------------------------------------------------

    def configure(
        self, *, store_address: str, prefix: str, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Build the group for a new quorum. All its members must call this.

        `prefix` must be new for each quorum; `timeout_s` limits this call and each collective.
        A world of one needs neither store nor network. Raises GroupNotBuilt or GroupAborted.
        """
        quorum = Quorum(
            store_address=store_address,
            prefix=prefix,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
        )
        _check(quorum)
        self._retire("a new quorum takes its place")
        self._quorum = quorum
        self._life = life = Life(f"group {prefix} (rank {rank} of {world_size})")
        if world_size == 1:
            life.start(SoloLink())
        else:
            self._build(life, quorum)
        if life.has_failed:
            raise life.failure() or AssertionError

    def _build(self, life: Life, quorum: Quorum) -> None:
        def failed(error: Exception) -> GroupError:
            return _not_built(life, quorum, reason(error))

        self._keep(build_in_background(life, lambda: self._connect(quorum), failed))
        if not life.settled.wait(quorum.timeout_s):
            life.fail(failed(TimeoutError("a member did not come")))

    def abort(self, reason: str = "abort() was called") -> None:
        """End every collective of this group now. It stays unusable until configure()."""
        life = self._life
        life.fail(GroupAborted(f"{life.name} was aborted: {reason}", reason=reason))

    def error(self) -> GroupError | None:
        """The first error since configure(), or None while the group is usable."""
        return self._life.failure()

    def settle(self) -> None:
        """Call it before a vote, after every wait(): raises the first error, if there is one.

        On a GPU it waits until all that was issued has really ended: a wait() there only orders
        streams and says nothing of success.
        """
        if (error := self._life.failure()) is not None:
            raise error

    def close(self) -> None:
        """Abort, and wait for what still runs in the background."""
        self._retire("the group is closed")
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _retire(self, reason: str) -> None:
        self.abort(reason)
        self._keep(drop_in_background(self._life))

    def _keep(self, thread: threading.Thread) -> None:
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _connect(self, quorum: Quorum) -> Link:
        """Connect to all members. Runs on a thread of its own and may block."""
        raise NotImplementedError

    # -- facts --------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._quorum.rank if self._quorum else 0

    def size(self) -> int:
        return self._quorum.world_size if self._quorum else 1

    def getRank(self) -> int:
        return self.rank()

    def getSize(self) -> int:
        return self.size()

    def getBackendName(self) -> str:
        return self.backend_name

    def getGroupName(self) -> str:
        return self.group_name

    def name(self) -> str:
        return self.backend_name

    # -- collectives: torch's names and arguments ---------------------------------------------

    def _issue(self, operation: str, *arguments: Any) -> GroupWork:
        """Start a collective. It never raises for a broken group: its wait() does."""
        if self._quorum is None:
            raise GroupNotConfigured(f"{operation} on a group that was never configured")
        life = self._life
        work = GroupWork(life, operation, self.hold_errors)
        if (link := life.link) is not None and not life.has_failed:
            try:
                work.inner = getattr(link.backend, operation)(*arguments)
            except RuntimeError as error:
                work.fail(error)
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> GroupWork:
        return self._issue("allreduce", tensors, opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> GroupWork:
        return self._issue("allreduce_coalesced", tensors, opts or c10d.AllreduceCoalescedOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> GroupWork:
        return self._issue("broadcast", tensors, opts or c10d.BroadcastOptions())

    def reduce(self, tensors: Any, opts: Any = None) -> GroupWork:
        return self._issue("reduce", tensors, opts or c10d.ReduceOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        return self._issue("allgather", outputs, inputs, opts or c10d.AllgatherOptions())

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> GroupWork:
        return self._issue("_allgather_base", output, input, opts or c10d.AllgatherOptions())

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> GroupWork:
        pairs = zip(outputs, inputs, strict=True)
        return joined([self._allgather_base(o, i, opts) for o, i in pairs])

    def gather_slices(self, whole: torch.Tensor, sizes: Sequence[int]) -> GroupWork:
        """Fill the flat tensor `whole` with slice r of rank r. `sizes` may differ a little."""
        slices = whole.split(list(sizes))
        if len(set(sizes)) == 1:
            return self._allgather_base(whole, slices[self.rank()])
        padded = whole.new_zeros(max(sizes))
        padded[: sizes[self.rank()]] = slices[self.rank()]
        rows = whole.new_empty(len(sizes), max(sizes))

        def unpack() -> None:
            for target, row in zip(slices, rows, strict=True):
                target.copy_(row[: target.numel()])

        return ThenWork(self._allgather_base(rows.view(-1), padded), unpack)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        return self._issue("reduce_scatter", outputs, inputs, opts or c10d.ReduceScatterOptions())

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> GroupWork:
        return self._issue(
            "_reduce_scatter_base", output, input, opts or c10d.ReduceScatterOptions()
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> GroupWork:
        pairs = zip(outputs, inputs, strict=True)
        return joined([self._reduce_scatter_base(o, i, opts) for o, i in pairs])

    def alltoall_base(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> GroupWork:
        """Send slice j of `input` to rank j. Empty split lists mean equal slices."""
        options = opts or c10d.AllToAllOptions()
        return self._issue("alltoall_base", output, input, output_splits, input_splits, options)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        return self._issue("gather", outputs, inputs, opts or c10d.GatherOptions())

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        return self._issue("scatter", outputs, inputs, opts or c10d.ScatterOptions())

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> GroupWork:
        return self._issue("send", tensors, dst_rank, tag)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> GroupWork:
        return self._issue("recv", tensors, src_rank, tag)

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._issue("barrier", opts or c10d.BarrierOptions())

    # The names that torch 2.13 gave to the same calls.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _check(quorum: Quorum) -> None:
    if not 0 <= quorum.rank < quorum.world_size:
        raise BadSetting(f"rank {quorum.rank} is not in a world of {quorum.world_size}")
    if quorum.timeout_s <= 0:
        raise BadSetting(f"timeout_s is {quorum.timeout_s}, but must be above 0")
    if quorum.world_size > 1:
        split_address(quorum.store_address)


def _not_built(life: Life, quorum: Quorum, why: str) -> GroupNotBuilt:
    return GroupNotBuilt(
        f"{life.name} was not built within {quorum.timeout_s:g} s over the store at "
        f"{quorum.store_address}: {why}",
        store_address=quorum.store_address,
        prefix=quorum.prefix,
    )
