"""Average flat tensors over the members that bring one: the same bits on every member.

Both ways go all-to-all, sum, hand out: exactly in float32, or packed to a byte a number, which
moves about a quarter of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ftcore.local_sgd.quantize import BLOCK, Kind, pack, packed_bytes, unpack
from ftcore.process_group.base import Group
from ftcore.process_group.work import GroupWork
from ftcore.reduce.exact import Deal, ExactReduction, slice_sizes


class Averaging(Protocol):
    """A reduction under way: call gather() once or more, later wait(); both raise GroupError."""

    def gather(self) -> None: ...

    def wait(self) -> None: ...


def start_average(
    group: Group,
    mine: torch.Tensor | None,
    *,
    givers: Sequence[int],
    out: torch.Tensor,
    quantize: Kind | None = None,
) -> Averaging:
    """Put the mean of the givers' tensors into `out`, on every member.

    givers: the replica ranks that bring a tensor; `mine` is this one's, or None. Flat float32.
    """
    deal = Deal(owner_of=tuple(givers), rank=group.rank(), world_size=group.size())
    if quantize is not None:
        return QuantizedAverage(group, mine, deal=deal, out=out, kind=quantize)
    local = {shard: mine for shard in deal.mine if mine is not None}
    return ExactReduction(group, local, deal=deal, out=out, scale=1 / len(givers))


class QuantizedAverage:
    """Each member packs its slices, sums those it gets in rank order, packs the sum again."""

    def __init__(
        self, group: Group, mine: torch.Tensor | None, *, deal: Deal, out: torch.Tensor, kind: Kind
    ) -> None:
        self._group, self._deal, self._out, self._kind = group, deal, out, kind
        blocks = -(-out.numel() // BLOCK)
        self._slices = [BLOCK * n for n in slice_sizes(blocks, deal.world_size)]
        sizes = [packed_bytes(n) for n in self._slices]
        my_size = sizes[deal.rank]
        self._received = out.new_empty(my_size * len(deal.owner_of), dtype=torch.uint8)
        arriving = [my_size * len(deal.shards_of(rank)) for rank in range(deal.world_size)]
        leaving = sizes if mine is not None else [0] * len(sizes)
        self._whole = out.new_empty(sum(sizes), dtype=torch.uint8)
        self._sizes = sizes
        self._gathering: GroupWork | None = None
        self._sending = group.alltoall_base(self._received, self._packed(mine), arriving, leaving)

    def _packed(self, mine: torch.Tensor | None) -> torch.Tensor:
        if mine is None:
            return self._out.new_empty(0, dtype=torch.uint8)
        padded = mine.new_zeros(sum(self._slices))
        padded[: mine.numel()] = mine
        return torch.cat([pack(part, self._kind) for part in padded.split(self._slices)])

    def gather(self) -> None:
        if self._gathering is not None:
            return
        self._sending.wait()
        size = self._sizes[self._deal.rank]
        if size:
            self._whole.split(self._sizes)[self._deal.rank].copy_(self._mean(size))
        self._gathering = self._group.gather_slices(self._whole, self._sizes)

    def _mean(self, size: int) -> torch.Tensor:
        """What arrived lies in the order of ranks already: a rank brings one tensor at most."""
        first, *rest = self._received.split(size)
        total = unpack(first, self._kind)
        for part in rest:
            total.add_(unpack(part, self._kind))
        return pack(total.div_(len(self._deal.owner_of)), self._kind)

    def wait(self) -> None:
        self.gather()
        assert self._gathering is not None
        self._gathering.wait()
        parts = self._whole.split(self._sizes)
        whole = torch.cat([unpack(p, self._kind) for p in parts if p.numel()])
        self._out.copy_(whole[: self._out.numel()])
