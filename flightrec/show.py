"""Prints the last calls of one rank, whole, as the recorder wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from flightrec.errors import NoSuchRank
from flightrec.model import Entry, Records
from flightrec.render import words
from flightrec.render.board import call_text


def show_rank(
    records: Records,
    rank: int,
    *,
    last: int | None = 30,
    group: str = "",
    op: str = "",
    stacks: bool = False,
) -> str:
    """Return one line per call, oldest first. Raises NoSuchRank when there is no dump of `rank`."""
    require_rank(records, rank)
    record = records.ranks[rank]
    entries = list(records.entries(rank))
    if record.columns and not entries:
        raise NoSuchRank(f"{record.source} is not here, only its digest", remedy="Name the dump.")
    found = [entry for entry in entries if _wanted(records, entry, group, op)]
    kept = found if last is None else found[-last:]
    head = f"rank {rank}: {len(kept)} of {len(found)} calls, from {record.source}"
    if not kept:
        return head + "\n"
    start = kept[0].created_ns
    lines = [head, f"{'+s':>9}  {'group':<16} {'#':>6}  {'state':<9}  call"]
    for entry in kept:
        lines += _lines(records, entry, start, stacks)
    return "\n".join(lines) + "\n"


def require_rank(records: Records, rank: int) -> None:
    """Raise NoSuchRank unless there is a dump of `rank`."""
    if rank not in records.ranks:
        there = words.ranks(records.ranks)
        raise NoSuchRank(f"there is no dump of rank {rank}, only of {there}", rank=rank)


def _wanted(records: Records, entry: Entry, group: str, op: str) -> bool:
    of = records.groups[entry.group]
    return (not group or group in (of.name, of.desc, str(of))) and op in entry.call.op


def _lines(records: Records, entry: Entry, start: int, stacks: bool) -> Iterator[str]:
    number = f"p{entry.p2p_seq}" if entry.is_p2p else str(entry.seq)
    state = "retired" if entry.is_retired and not entry.is_completed else entry.state
    seconds = (entry.created_ns - start) / 1e9
    group = str(records.groups[entry.group])[:16]
    took = f"  {entry.duration_ms:.3f} ms" if entry.duration_ms is not None else ""
    yield (f"{seconds:9.3f}  {group:<16} {number:>6}  {state:<9}  {call_text(entry.call)}{took}")
    frame = words.user_frame(entry.site)
    if stacks:
        yield from (f"{'':>46}{frame}" for frame in islice(entry.site, 40))
    elif frame is not None:
        yield f"{'':>46}{words.short_path(str(frame))}"
