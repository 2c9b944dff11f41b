"""Sum shards of gradients across ranks in shard order: the same bits however shards are dealt.

Rank j sums slice j. All-to-all brings slice j of every shard to rank j, rank j adds them up in
shard order, all-gather hands the sums out. With one shard a rank this moves the bytes of a ring
all-reduce. Addition is elementwise, so where the slices end cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ftcore.process_group.base import Group
from ftcore.process_group.work import GroupWork
from ftcore.reduce.errors import BadDeal

_ACCUMULATE_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

_CACHED_NUMEL = 2**17  # half a megabyte of float32


@dataclass(frozen=True, slots=True)
class Deal:
    """Which replica rank computed which shard. Every shard has one owner."""

    owner_of: tuple[int, ...]
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        strays = {owner for owner in self.owner_of if not 0 <= owner < self.world_size}
        if strays or not self.owner_of:
            raise BadDeal(
                f"the {len(self.owner_of)} shards belong to ranks {sorted(set(self.owner_of))}, "
                f"but the world has ranks 0 to {self.world_size - 1}"
            )

    def shards_of(self, rank: int) -> list[int]:
        return [shard for shard, owner in enumerate(self.owner_of) if owner == rank]

    @property
    def mine(self) -> list[int]:
        return self.shards_of(self.rank)


def slice_sizes(numel: int, parts: int) -> list[int]:
    """Split `numel` elements into `parts` slices that differ by at most one."""
    small, larger = divmod(numel, parts)
    return [small + (part < larger) for part in range(parts)]


class ExactReduction:
    """One flat gradient on its way: all-to-all, then `gather()`, then `wait()`.

    Several may be under way at once; every rank must take the same steps in the same order. With
    `workspace`, a flat tensor that is reused for what arrives, a step touches no fresh memory.
    """

    def __init__(
        self,
        group: Group,
        local: Mapping[int, torch.Tensor],
        *,
        deal: Deal,
        out: torch.Tensor,
        scale: float = 1.0,
        workspace: torch.Tensor | None = None,
    ) -> None:
        _check(local, deal, out)
        self._group, self._deal, self._out, self._scale = group, deal, out, scale
        self._sizes = slice_sizes(out.numel(), deal.world_size)
        self._gathering: GroupWork | None = None
        self._sending: GroupWork | None = None
        if deal.world_size == 1:
            _sum_in_order([local[shard] for shard in deal.mine], out, scale)
        else:
            self._send([local[shard] for shard in deal.mine], workspace)

    def _send(self, shards: list[torch.Tensor], workspace: torch.Tensor | None) -> None:
        """Send slice j of each of my shards to rank j."""
        mine = self._sizes[self._deal.rank]
        counts = [len(self._deal.shards_of(rank)) for rank in range(self._deal.world_size)]
        total = mine * len(self._deal.owner_of)
        self._received = self._out.new_empty(total) if workspace is None else workspace[:total]
        self._sending = self._group.alltoall_base(
            self._received,
            _by_destination(shards, self._sizes, self._out),
            [mine * count for count in counts],
            [size * len(shards) for size in self._sizes],
        )

    def gather(self) -> None:
        """Wait for the slices, add them up, and start to hand the sum out. Only once."""
        if self._sending is None or self._gathering is not None:
            return
        self._sending.wait()
        self._add_up(self._out.split(self._sizes)[self._deal.rank])
        self._gathering = self._group.gather_slices(self._out, self._sizes)

    def _add_up(self, total: torch.Tensor) -> None:
        if total.numel() == 0:
            return
        arrived = [s for rank in range(self._deal.world_size) for s in self._deal.shards_of(rank)]
        parts = dict(zip(arrived, self._received.split(total.numel()), strict=True))
        _sum_in_order([parts[shard] for shard in sorted(parts)], total, self._scale)

    def wait(self) -> None:
        """Wait until `out` holds the sum."""
        if self._gathering is not None:
            self._gathering.wait()


def reduce_exact(
    group: Group,
    local: Mapping[int, torch.Tensor],
    *,
    owner_of: Sequence[int],
    out: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Put scale × the sum of all shards, added in shard order, into the flat tensor `out`.

    Every rank gets the same bits. `local` maps this rank's shards to flat tensors like `out`;
    `owner_of[shard]` is the replica rank that has it, the same on every rank. Ranks without shards
    take part all the same. float16 and bfloat16 are added in float32 and rounded once. Raises
    GroupError when the group breaks.
    """
    deal = Deal(owner_of=tuple(owner_of), rank=group.rank(), world_size=group.size())
    reduction = ExactReduction(group, local, deal=deal, out=out, scale=scale)
    reduction.gather()
    reduction.wait()


def _by_destination(
    shards: list[torch.Tensor], sizes: list[int], like: torch.Tensor
) -> torch.Tensor:
    """Lay slices out by destination, then by shard. One shard lies so already: no copy."""
    if len(shards) == 1:
        return shards[0].contiguous()
    if not shards:
        return like.new_empty(0)
    ends = list(accumulate(sizes))
    slices = [s[end - n : end] for n, end in zip(sizes, ends, strict=True) for s in shards]
    return torch.cat(slices)


def _sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float) -> None:
    """out = scale × (((parts[0] + parts[1]) + parts[2]) + …), rounded to a narrow dtype at the end.

    A rank scales only its own slice, before it is handed out. On a CPU piece by piece, so that a
    piece stays in its cache: 35 MB of three shards take 18 ms so, 30 in whole.
    """
    numel = out.numel() if out.is_cuda else min(out.numel(), _CACHED_NUMEL)
    for start in range(0, out.numel(), max(numel, 1)):
        end = start + numel
        _sum_piece([part[start:end] for part in parts], out[start:end], scale)


def _sum_piece(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float) -> None:
    wide = _ACCUMULATE_IN.get(out.dtype)
    total = out if wide is None else torch.empty_like(out, dtype=wide)
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    if scale != 1.0:
        total.mul_(scale)
    if total is not out:
        out.copy_(total)


def _check(local: Mapping[int, torch.Tensor], deal: Deal, out: torch.Tensor) -> None:
    if sorted(local) != deal.mine:
        raise BadDeal(
            f"rank {deal.rank} was dealt shards {deal.mine}, but brings shards {sorted(local)}"
        )
    for shard, tensor in local.items():
        if tensor.shape != out.shape or out.dim() != 1 or tensor.dtype != out.dtype:
            raise BadDeal(
                f"shard {shard} is {tuple(tensor.shape)} {tensor.dtype}, but the result is "
                f"{tuple(out.shape)} {out.dtype}; both must be flat and alike"
            )
