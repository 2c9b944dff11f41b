"""Lay out a made-up training job: its groups, and the calls that each rank makes in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks in each direction. The rank of (p, d, t) is (p * dp + d) * tp + t."""

    dp: int = 2
    tp: int = 1
    pp: int = 1
    ep: int = 1  # expert groups: so many neighbours along dp exchange tokens

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.tp * self.dp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, p: int, d: int, t: int) -> int:
        return (p * self.dp + d) * self.tp + t


@dataclass(frozen=True, slots=True)
class MadeGroup:
    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call: a collective, or with a peer a send or receive. Equal `batch`: one launch."""

    group: int
    op: str
    numel: int
    line: int
    dtype: str = "Float"
    peer: int | None = None  # global rank
    batch: int = 0  # 0: on its own
    root: int = 0  # global rank, for gathers

    @property
    def key(self) -> tuple[object, ...]:
        """What members must share for the call to be one collective."""
        return (self.op, self.numel, self.dtype, self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of so many steps. The same values make the same job."""

    layout: Layout = field(default_factory=Layout)
    steps: int = 4
    layers: int = 2
    microbatches: int = 2
    buckets: int = 2
    is_batched_p2p: bool = False
    gathers: bool = False

    def groups(self) -> list[MadeGroup]:
        """All groups in order of creation, equal on all ranks."""
        lay = self.layout
        found = [MadeGroup("0", "default_pg", tuple(range(lay.world)))]

        def add(desc: str, ranks: list[int]) -> None:
            if len(ranks) > 1:
                found.append(MadeGroup(str(len(found)), desc, tuple(ranks)))

        for p in range(lay.pp):
            for d in range(lay.dp):
                add("tp", [lay.rank(p, d, t) for t in range(lay.tp)])
        for p in range(lay.pp):
            for t in range(lay.tp):
                add("dp", [lay.rank(p, d, t) for d in range(lay.dp)])
                for first in range(0, lay.dp if lay.ep > 1 else 0, lay.ep):
                    members = range(first, min(first + lay.ep, lay.dp))
                    add("ep", [lay.rank(p, d, t) for d in members])
        for d in range(lay.dp):
            for t in range(lay.tp):
                add("pp", [lay.rank(p, d, t) for p in range(lay.pp)])
        return found

    def program(self, rank: int) -> list[list[Op]]:
        """The calls of one rank, step by step."""
        mine = {g.desc: i for i, g in enumerate(self.groups()) if rank in g.ranks}
        return [list(self._step(rank, mine)) for _ in range(self.steps)]

    def ending(self) -> list[Op]:
        """What every rank calls after its loop."""
        return [Op(group=0, op="all_reduce_barrier", numel=1, line=900)]

    def _step(self, rank: int, mine: dict[str, int]) -> Iterator[Op]:
        for batch in range(1, self.microbatches + 1):
            yield from self._microbatch(rank, mine, batch)
        for bucket in range(self.buckets):
            if "dp" in mine:
                numel = 4096 << bucket
                yield Op(group=mine["dp"], op="all_reduce", numel=numel, line=300 + bucket)
        if self.gathers:
            yield Op(group=0, op="gather", numel=16, line=400)
        yield Op(group=0, op="all_reduce", numel=1, line=410)

    def _microbatch(self, rank: int, mine: dict[str, int], batch: int) -> Iterator[Op]:
        p, d, t = self.layout.place(rank)
        together = batch if self.is_batched_p2p else 0
        if p > 0:
            source = self.layout.rank(p - 1, d, t)
            yield Op(group=mine["pp"], op="recv", numel=512, line=100, peer=source, batch=together)
        for layer in range(self.layers):
            if "tp" in mine:
                yield Op(group=mine["tp"], op="_all_gather_base", numel=256, line=200 + 10 * layer)
                yield Op(group=mine["tp"], op="all_reduce", numel=256, line=201 + 10 * layer)
            if "ep" in mine:
                yield Op(group=mine["ep"], op="all_to_all", numel=128, line=202 + 10 * layer)
        if p < self.layout.pp - 1:
            target = self.layout.rank(p + 1, d, t)
            yield Op(group=mine["pp"], op="send", numel=512, line=101, peer=target, batch=together)
