"""Flat gradient buckets of a module, reduced across replica groups, fast or exactly.

Fast, with overlap (arm before the last backward) or without:

    buckets.arm(group, weight=1 / groups)
    loss.backward()
    buckets.reduce_fast(group, weight=1 / groups)

Exact: each shard's gradients are kept apart until they are summed in shard order:

    for shard in mine:
        with buckets.shard(shard):
            loss(batch_of(shard)).backward()
    buckets.reduce_exact(group, owner_of=owner_of, scale=1 / len(owner_of))

After either, `.grad` of every parameter is a view of a flat bucket: nothing is copied back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ftcore.base.log import event
from ftcore.process_group.base import Group
from ftcore.process_group.errors import GroupError
from ftcore.process_group.work import GroupWork
from ftcore.reduce.errors import BadDeal, GradientAfterLaunch
from ftcore.reduce.exact import Deal, ExactReduction
from ftcore.reduce.flat import FlatBucket, slots_of
from ftcore.reduce.launches import Launches
from ftcore.reduce.layout import BUCKET_BYTES_MAX, layout_hash, plan_buckets

log = logging.getLogger(__name__)


class Buckets:
    """The gradients of `params` in flat tensors. Sharded parameters (DTensor) count by their shard.

    Parameters that need no gradient are left out. One that got none in a step counts as zeros, is
    logged once, and stands in `missing`.
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        *,
        bucket_bytes_max: int = BUCKET_BYTES_MAX,
    ) -> None:
        named = params.named_parameters() if isinstance(params, torch.nn.Module) else params
        self._params = {name: p for name, p in named if p.requires_grad}
        slots = slots_of(self._params)
        self.layout_hash = layout_hash(slots)
        plans = plan_buckets(slots, bucket_bytes_max=bucket_bytes_max)
        self._buckets = [FlatBucket(plan, self._params) for plan in plans]
        self._bucket_of = {s.name: i for i, plan in enumerate(plans) for s in plan.slots}
        self._told_missing: set[str] = set()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._launches: Launches | None = None
        self._counts: Counter[str] | None = None  # of each parameter's gradients, in the first step
        self._backwards: int | None = None  # as many as came then
        self.missing: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self._buckets)

    # -- fast ---------------------------------------------------------------------------------

    def arm(self, group: Group, *, weight: float, backwards: int | None = 1) -> None:
        """Start each bucket's reduction as soon as its gradients are there.

        Call it before the last backward of the step; with `backwards`, before the last so many
        (the microbatches of one pipeline schedule). None: as many as came the first time, which
        is reduced at its end. reduce_fast() ends it, or cancel().
        """
        self.cancel()
        self._hook_parameters()
        backwards = backwards or self._backwards
        if backwards is None:
            self._counts = Counter()
        else:
            self._launches = self._new_launches(group, weight, backwards)

    def reduce_fast(self, group: Group, *, weight: float) -> None:
        """Replace every gradient by the sum over ranks of weight × gradient; weights add up to 1.

        Buckets that arm() has not launched are launched now, in order. Raises the GroupError of a
        group that broke; the gradients are gone then, and the step is to be repeated.
        """
        if self._counts is not None:
            self._backwards, self._counts = max(self._counts.values(), default=None), None
        launches = self._launches or self._new_launches(group, weight, 1)
        try:
            early = len(launches.works)
            launches.launch_all()
            self._refuse_late_changes(self._buckets[:early])
            self._finish(group, [work.wait for work in launches.works])
        finally:
            self._launches = launches
            self.cancel()
        for bucket in self._buckets:
            bucket.show(bucket.flat)

    def _refuse_late_changes(self, launched: Iterable[FlatBucket]) -> None:
        for bucket in launched:
            if bucket.changed_since_filled():
                raise GradientAfterLaunch(
                    f"a gradient of {', '.join(bucket.names)} changed after its bucket was sent"
                )

    def cancel(self) -> None:
        """Forget an armed step whose backward did not end. Abort the group first: this waits for
        what was launched, so that nothing writes into the buckets later."""
        if (launches := self._launches) is not None:
            self._launches = None
            for work in launches.works:
                with suppress(GroupError):
                    work.wait()

    def _new_launches(self, group: Group, weight: float, backwards: int) -> Launches:
        def launch(index: int) -> GroupWork:
            bucket = self._buckets[index]
            self._note_missing(bucket.fill(bucket.flat, weight=weight))
            return group.allreduce([bucket.flat])

        return Launches([len(b.names) for b in self._buckets], backwards, launch)

    # -- exact --------------------------------------------------------------------------------

    @contextmanager
    def shard(self, shard: int) -> Iterator[None]:
        """The gradients of the backwards inside belong to this shard, and to this shard only."""
        self.clear()
        try:
            yield
        except BaseException:
            self.clear()
            raise
        for bucket in self._buckets:
            self._note_missing(bucket.fill(bucket.of_shard(shard)))

    @property
    def shards(self) -> frozenset[int]:
        """The shards whose gradients are here: a repeated step need not compute them again."""
        return frozenset(self._buckets[0].shards) if self._buckets else frozenset()

    def forget_shards(self) -> None:
        """Drop the shards' gradients, after a commit. Their memory is used again."""
        for bucket in self._buckets:
            bucket.forget_shards()

    def shards_are_finite(self) -> bool:
        """Whether no gradient of the shards that are here is nan or infinite."""
        flats = [flat for bucket in self._buckets for flat in bucket.shards.values()]
        return all(bool(flat.isfinite().all()) for flat in flats)

    def reduce_exact(self, group: Group, *, owner_of: Sequence[int], scale: float = 1.0) -> None:
        """Replace every gradient by scale × the sum of all shards, added in shard order.

        `owner_of[shard]` is the replica rank that has it. Raises the GroupError of a group that
        broke; the shards stay here for the repeated step until forget_shards().
        """
        deal = Deal(owner_of=tuple(owner_of), rank=group.rank(), world_size=group.size())
        if absent := set(deal.mine) - self.shards:
            raise BadDeal(
                f"rank {deal.rank} was dealt shards {sorted(absent)} but has not run them"
            )
        running = [
            ExactReduction(
                group,
                {shard: bucket.of_shard(shard) for shard in deal.mine},
                deal=deal,
                out=bucket.flat,
                scale=scale,
                workspace=bucket.workspace(len(deal.owner_of), deal.world_size),
            )
            for bucket in self._buckets
        ]
        self._finish(group, [r.gather for r in running] + [r.wait for r in running])
        for bucket in self._buckets:
            bucket.show(bucket.flat)

    # -- both ---------------------------------------------------------------------------------

    def clear(self) -> None:
        """Set every gradient to None."""
        for param in self._params.values():
            param.grad = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    def _finish(self, group: Group, waits: Sequence[Callable[[], object]]) -> None:
        """Wait for everything, even after an error: no collective may write into a bucket later."""
        first: GroupError | None = None
        for wait in waits:
            try:
                wait()
            except GroupError as error:
                first = first or error
        first = first or group.error()
        if first is not None:
            self.clear()
            raise first

    def _note_missing(self, names: Iterable[str]) -> None:
        missing = frozenset(names)
        self.missing |= missing
        for name in sorted(missing - self._told_missing):
            event(log, "reduce.gradient_missing", level=logging.WARNING, parameter=name, used=0.0)
        self._told_missing |= missing

    def _hook_parameters(self) -> None:
        if self._hooks:
            return
        for name, param in self._params.items():
            index = self._bucket_of[name]
            hook = lambda _, index=index, name=name: self._on_gradient(index, name)  # noqa: E731
            self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def _on_gradient(self, index: int, name: str) -> None:
        if self._counts is not None:
            self._counts[name] += 1
        if (launches := self._launches) is not None:
            launches.gradient_came(index, name)
