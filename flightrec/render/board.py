"""Lays out what matrix, page and timeline show: for each group, ranks × the calls around the fault.

A cell is one letter: c completed, s started, w issued and waiting, n not issued, o overwritten in
the ring, x no dump of this rank. An upper-case letter marks a call unlike the others in its column.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flightrec.model import (
    FLAG_P2P,
    FLAG_RETIRED,
    STATE_COMPLETED,
    STATE_SCHEDULED,
    STATE_STARTED,
    Call,
    Columns,
    RankRecord,
    Records,
    Report,
)

CELLS_MAX = 300_000  # on one page: about 4 MB of HTML
COLUMNS_MIN, COLUMNS_MAX = 16, 96
ROWS_MAX = 24_000
LETTER = {STATE_SCHEDULED: "w", STATE_STARTED: "s", STATE_COMPLETED: "c"}
NOT_ISSUED, OVERWRITTEN, NO_DUMP = "n", "o", "x"
SAME_ON_ALL = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather_into", "_all_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One call of one rank, as far as the layout needs it."""

    letter: str
    call: int
    site: int
    created_ns: int
    duration_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank's cells, one per column; None where it recorded nothing."""

    rank: int
    letters: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBoard:
    """One group. Columns of collectives are sequence numbers, equal on all ranks; columns of sends
    and recvs are each rank's last ones in its own order, the newest at the right."""

    group: int
    label: str
    is_p2p: bool
    seqs: tuple[int, ...]
    calls: tuple[int, ...]  # the usual call of each column; -1: none
    rows: tuple[Row, ...]
    is_hanging: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All groups, the one that matters most first."""

    groups: tuple[GroupBoard, ...]
    left_out: int = 0  # groups for which there was no room


@dataclass(slots=True)
class _Reach:
    """How far all ranks of a group got: what to centre the columns on."""

    first: int | None = None
    last: int = -1
    first_open: int | None = None
    has_p2p: bool = False


def layout(records: Records, report: Report) -> Board:
    """Choose groups and columns and fill the cells. Linear in the entries."""
    reach = _reach(records)
    order = _order(records, report, reach)
    sizes = sum(len(records.groups[g].ranks) for g in order) or 1
    width = max(COLUMNS_MIN, min(COLUMNS_MAX, CELLS_MAX // sizes))
    kept = list(_that_fit(records, order))
    windows = {g: _window(reach[g], _focus(records, report, g), width) for g in kept}
    boards: list[GroupBoard] = []
    collected = {rank: _collect(records, rank, windows, width) for rank in sorted(records.ranks)}
    for g in kept:
        boards += _boards(records, g, windows[g], collected, reach[g])
    return Board(groups=tuple(boards), left_out=len(order) - len(kept))


def _reach(records: Records) -> dict[int, _Reach]:
    reach: dict[int, _Reach] = defaultdict(_Reach)
    for record in records.ranks.values():
        if record.columns is None:
            _reach_of_frontiers(record, reach)
        else:
            _reach_of_columns(records, record, record.columns, reach)
    return reach


def _reach_of_frontiers(record: RankRecord, reach: dict[int, _Reach]) -> None:
    for g, at in record.frontiers.items():
        waiting = at.waiting.seq if at.waiting else None
        last = max(at.last_enqueued, at.last_completed, waiting or -1)
        _extend(reach[g], min(1, last), last, waiting)


def _reach_of_columns(
    records: Records, record: RankRecord, columns: Columns, reach: dict[int, _Reach]
) -> None:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    first_open: dict[int, int] = {}
    is_gloo = record.library == "gloo"
    batches: set[int] = set()
    for g, seq, call, flags in zip(
        columns.group, columns.seq, columns.call, columns.flags, strict=True
    ):
        if flags & FLAG_P2P:
            reach[g].has_p2p = True
            batches.add(g)
            continue
        if _closes_batch(records, batches, g, call):
            continue
        if seq > last.get(g, -1):
            last[g] = seq
            first.setdefault(g, seq)
        if _letter(flags, is_gloo) != "c":
            first_open.setdefault(g, seq)
        elif records.calls[call].op == "coalesced" and first_open.get(g) == seq:
            del first_open[g]
    for g, seq in last.items():
        _extend(reach[g], first[g], seq, first_open.get(g))


def _closes_batch(records: Records, batches: set[int], g: int, call: int) -> bool:
    """Whether this entry only ends a batch of sends and recvs. It counts as no collective."""
    if g not in batches:
        return False
    batches.discard(g)
    return records.calls[call].op == "coalesced"


def _extend(reach: _Reach, first: int, last: int, first_open: int | None) -> None:
    reach.first = first if reach.first is None else min(first, reach.first)
    reach.last = max(reach.last, last)
    if first_open is not None:
        known = reach.first_open
        reach.first_open = first_open if known is None else min(known, first_open)


def _letter(flags: int, is_gloo: bool) -> str:
    if is_gloo and flags & FLAG_RETIRED:  # gloo never leaves "scheduled"
        return "c"
    return LETTER.get(flags & 3, "w")


def _order(records: Records, report: Report, reach: Mapping[int, _Reach]) -> list[int]:
    """Groups with a culprit first, then those that hang, then the largest."""
    guilty = {culprit.group for culprit in report.culprits}
    ranks = {culprit.rank for culprit in report.culprits}

    def key(g: int) -> tuple[bool, bool, bool, int, int]:
        group = records.groups[g]
        named = str(group) in guilty or group.name in guilty
        return (
            not (named and ranks & set(group.ranks)),
            not ranks & set(group.ranks),
            reach[g].first_open is None,
            -len(group.ranks),
            g,
        )

    return sorted(reach, key=key)


def _that_fit(records: Records, order: list[int]) -> Iterator[int]:
    rows = 0
    for g in order:
        rows += len(records.groups[g].ranks)
        if rows <= ROWS_MAX or rows == len(records.groups[g].ranks):
            yield g


def _focus(records: Records, report: Report, g: int) -> int | None:
    """The call of this group that the verdict is about."""
    group = records.groups[g]
    for culprit in report.culprits:
        named = culprit.group in (str(group), group.name)
        if named and culprit.rank in group.ranks and culprit.seq is not None:
            return culprit.seq
    return None


def _window(reach: _Reach, focus: int | None, width: int) -> range:
    """Columns around the focus, or the first open call, or the end."""
    at = focus if focus is not None else reach.first_open
    last = reach.last if at is None else min(reach.last, at + width // 3)
    return range(max(reach.first or 0, last - width + 1), last + 1)


@dataclass(slots=True)
class _Collected:
    """One rank's cells: collectives by group and seq, sends and recvs by group in order."""

    cells: dict[int, dict[int, Cell]]
    p2p: dict[int, list[tuple[int, Cell]]]  # (p2p_seq, cell)
    first: dict[int, int]
    last: dict[int, int]


def _collect(records: Records, rank: int, windows: Mapping[int, range], width: int) -> _Collected:
    record = records.ranks[rank]
    found = _Collected(defaultdict(dict), defaultdict(list), {}, {})
    if record.columns is None:
        _collect_frontiers(record, windows, found)
        return found
    c, is_gloo = record.columns, record.library == "gloo"
    batches: set[int] = set()
    for i, (g, seq, flags) in enumerate(zip(c.group, c.seq, c.flags, strict=True)):
        if flags & FLAG_P2P:
            batches.add(g)
            if g in windows:
                cell = _cell(c, i, _letter(flags, is_gloo))
                _add_p2p(found.p2p[g], c.p2p_seq[i], cell, width)
            continue
        if _closes_batch(records, batches, g, c.call[i]):
            _close_batch(found.p2p[g], c.p2p_seq[i], _letter(flags, is_gloo))
            continue
        found.first.setdefault(g, seq)
        found.last[g] = max(seq, found.last.get(g, -1))
        if g in windows and seq in windows[g]:
            _add(records, found.cells[g], seq, _cell(c, i, _letter(flags, is_gloo)))
    return found


def _collect_frontiers(record: RankRecord, windows: Mapping[int, range], found: _Collected) -> None:
    """Without entries (log-only mode) all cells follow from two numbers."""
    for g, at in record.frontiers.items():
        waiting = at.waiting.seq if at.waiting else None
        done = at.last_completed if waiting is None else max(at.last_completed, waiting - 1)
        found.first[g] = 0
        found.last[g] = max(at.last_enqueued, done, waiting or -1)
        for seq in windows.get(g, ()):
            if seq <= found.last[g]:
                letter = "c" if seq <= done else "w"
                found.cells[g][seq] = Cell(
                    letter=letter, call=-1, site=-1, created_ns=0, duration_ms=-1.0
                )


def _cell(c: Columns, i: int, letter: str) -> Cell:
    return Cell(
        letter=letter,
        call=c.call[i],
        site=c.site[i],
        created_ns=c.created_ns[i],
        duration_ms=c.duration_ms[i] if c.duration_ms else -1.0,
    )


def _add(records: Records, cells: dict[int, Cell], seq: int, cell: Cell) -> None:
    """A closing "coalesced" entry carries the state of the call it closes."""
    before = cells.get(seq)
    if before is not None and records.calls[cell.call].op == "coalesced":
        cell = replace(before, letter=cell.letter, duration_ms=cell.duration_ms)
    cells[seq] = cell


def _add_p2p(lane: list[tuple[int, Cell]], seq: int, cell: Cell, width: int) -> None:
    lane.append((seq, cell))
    if len(lane) > 2 * width:
        del lane[:width]


def _close_batch(lane: list[tuple[int, Cell]], seq: int, letter: str) -> None:
    """The sends and recvs of a batch stay "scheduled"; their closing entry knows better."""
    for place in range(len(lane) - 1, -1, -1):
        if lane[place][0] != seq:
            break
        lane[place] = seq, replace(lane[place][1], letter=letter)


def _boards(
    records: Records,
    g: int,
    window: range,
    collected: Mapping[int, _Collected],
    reach: _Reach,
) -> Iterator[GroupBoard]:
    group = records.groups[g]
    if reach.last >= 0:
        cells = {r: _line(collected.get(r), g, window) for r in group.ranks}
        yield _board(records, g, str(group), False, tuple(window), cells)
    if reach.has_p2p:
        lanes = {
            r: [cell for _, cell in collected[r].p2p.get(g, [])] if r in collected else []
            for r in group.ranks
        }
        width = min(max(map(len, lanes.values()), default=0), COLUMNS_MAX)
        columns = tuple(range(-width + 1, 1))
        lines = {r: _lane(lanes[r], width, r in collected) for r in group.ranks}
        yield _board(records, g, f"{group}: send and recv", True, columns, lines)


Line = tuple[list[Cell | None], list[str]]


def _line(found: _Collected | None, g: int, window: range) -> Line:
    if found is None:
        return [None] * len(window), [NO_DUMP] * len(window)
    cells = [found.cells[g].get(seq) for seq in window]
    first, last = found.first.get(g), found.last.get(g, -1)
    letters = [
        cell.letter
        if cell
        else (OVERWRITTEN if first is not None and seq < first and seq <= last else NOT_ISSUED)
        for seq, cell in zip(window, cells, strict=True)
    ]
    return cells, letters


def _lane(cells: list[Cell], width: int, has_dump: bool) -> Line:
    tail = cells[-width:] if width else []
    blank = NOT_ISSUED if has_dump else NO_DUMP
    room = width - len(tail)
    return [None] * room + list(tail), [blank] * room + [cell.letter for cell in tail]


def _board(
    records: Records,
    g: int,
    label: str,
    is_p2p: bool,
    seqs: tuple[int, ...],
    lines: Mapping[int, Line],
) -> GroupBoard:
    usual = tuple(_usual(cells[place] for cells, _ in lines.values()) for place in range(len(seqs)))
    rows = []
    for rank, (cells, letters) in lines.items():
        marked = [
            letter.upper() if cell and not is_p2p and _is_odd(records, cell.call, call) else letter
            for cell, letter, call in zip(cells, letters, usual, strict=True)
        ]
        rows.append(Row(rank=rank, letters="".join(marked), cells=tuple(cells)))
    hanging = any(letter in "ws" for row in rows for letter in row.letters.lower())
    return GroupBoard(
        group=g,
        label=label,
        is_p2p=is_p2p,
        seqs=seqs,
        calls=usual,
        rows=tuple(rows),
        is_hanging=hanging,
    )


def _usual(cells: Iterator[Cell | None]) -> int:
    counts = Counter(cell.call for cell in cells if cell is not None)
    return min(counts, key=lambda call: (-counts[call], call)) if counts else -1


def _is_odd(records: Records, call: int, usual: int) -> bool:
    """Another operation, or another size where sizes must be equal."""
    if call == usual or call < 0 or usual < 0:
        return False
    one, two = records.calls[call], records.calls[usual]
    return one.op != two.op or (one.op.startswith(SAME_ON_ALL) and _shape(one) != _shape(two))


def _shape(call: Call) -> object:
    return call.input_sizes, call.input_dtypes


def call_text(call: Call) -> str:
    """`all_reduce [1024, 4] Float`: what was called, in one line."""
    sizes = ", ".join(str(list(size)) for size in call.input_sizes[:3])
    more = f" and {len(call.input_sizes) - 3} more" if len(call.input_sizes) > 3 else ""
    dtype = " ".join(dict.fromkeys(call.input_dtypes))
    peer = f" with {call.peer}" if call.peer is not None else ""
    return f"{call.op}{peer} {sizes}{more} {dtype}".strip()
