"""Decide which groups of different ranks' dumps are one group, and who its members are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flightrec.dump import Dump, LocalGroup
from flightrec.model import Call, Group

# The operations whose sizes tell how many members the group has: output over input, or back.
_SIZED_BY_MEMBERS = ("all_gather", "gather", "reduce_scatter", "scatter")


@dataclass(frozen=True, slots=True)
class Grouping:
    """All groups, and for each rank which of them its local groups are, in the file's order."""

    groups: tuple[Group, ...]
    index_of: Mapping[int, tuple[int, ...]]


def unify(dumps: Mapping[int, Dump]) -> Grouping:
    """Name each group by (name, desc, members, incarnation): equal on all members.

    A name that comes twice with the same members on one rank is a group that was made again; its
    lives are paired in order, from the newest where a ring has wrapped over the older ones.
    """
    silent = _silent_groups(dumps)
    members = {rank: _members_of(rank, dump, silent) for rank, dump in dumps.items()}
    lives: dict[tuple[str, str, tuple[int, ...]], dict[int, list[int]]] = {}
    for rank, dump in sorted(dumps.items()):
        order = sorted(range(len(dump.groups)), key=lambda i: _age(dump.groups[i]))
        for local in order:
            group = dump.groups[local]
            key = (group.name, group.desc, members[rank][local])
            lives.setdefault(key, {}).setdefault(rank, []).append(local)
    groups: list[Group] = []
    index_of: dict[int, dict[int, int]] = {rank: {} for rank in dumps}
    for (name, desc, ranks), locals_of in sorted(lives.items()):
        count = max(map(len, locals_of.values()))
        declared = any(
            dumps[rank].groups[local].ranks for rank, ids in locals_of.items() for local in ids
        )
        for rank, locals_ in locals_of.items():
            skipped = count - len(locals_) if dumps[rank].first_record_id > 0 else 0
            for life, local in enumerate(locals_, skipped):
                index_of[rank][local] = len(groups) + life
        for life in range(count):
            groups.append(
                Group(name=name, desc=desc, ranks=ranks, incarnation=life, is_declared=declared)
            )
    return Grouping(
        tuple(groups),
        {r: tuple(found[i] for i in range(len(found))) for r, found in index_of.items()},
    )


def _age(group: LocalGroup) -> tuple[int, str, str]:
    return (group.pg_id if group.pg_id is not None else 1 << 62, group.name, group.desc)


def _members_of(
    rank: int, dump: Dump, silent: Mapping[tuple[str, str], tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    offset = _offset(rank, dump)
    found = []
    for group in dump.groups:
        by = 0 if group.is_global else offset
        ranks = tuple(member + by for member in group.ranks or ())
        found.append(ranks if rank in ranks else silent[(group.name, group.desc)])
    return tuple(found)


def _offset(rank: int, dump: Dump) -> int:
    """torchft numbers the default group of each replica group from 0, but names files by the
    global rank: the replica group of rank 5 with two ranks each starts at 4."""
    for group in dump.groups:
        if group.desc == "default_pg" and group.ranks:
            size = len(group.ranks)
            if rank >= size and group.ranks == tuple(range(size)):
                return rank // size * size
    return 0


def _silent_groups(dumps: Mapping[int, Dump]) -> dict[tuple[str, str], tuple[int, ...]]:
    """The members of each group where files are silent (gloo): who recorded calls under its name;
    in the default group everybody, up to the number that gathers show."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        for key in {(group.name, group.desc) for group in dump.groups}:
            found.setdefault(key, []).append(rank)
    is_silent = any(not group.ranks for dump in dumps.values() for group in dump.groups)
    shown = max((_members_shown(dump) for dump in dumps.values() if is_silent), default=0)
    everybody = tuple(range(max(max(dumps) + 1, shown)))
    return {
        key: everybody if key[1] == "default_pg" else tuple(ranks) for key, ranks in found.items()
    }


def _members_shown(dump: Dump) -> int:
    """The number of members of the default group that its gathers and scatters show, or 0."""
    for local, group in enumerate(dump.groups):
        if group.desc == "default_pg":
            used = {
                c for g, c in zip(dump.columns.group, dump.columns.call, strict=True) if g == local
            }
            return max((members_of_call(dump.calls[c]) for c in used), default=0)
    return 0


def members_of_call(call: Call) -> int:
    """How many members a gather-like call shows its group to have; 0: it does not tell."""
    if not any(word in call.op for word in _SIZED_BY_MEMBERS) or "coalesced" in call.op:
        return 0
    small, big = sorted((numel(call.input_sizes), numel(call.output_sizes)))
    return big // small if small and big % small == 0 and big > small else 0


def numel(sizes: tuple[tuple[int, ...], ...]) -> int:
    """The number of elements of all tensors of one side."""
    total = 0
    for size in sizes:
        product = 1
        for extent in size:
            product *= extent
        total += product
    return total
