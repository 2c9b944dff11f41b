"""Writes a report as one self-contained page: verdict, matrix, timeline, stacks; opens offline.

The page holds its data as one JSON block and draws it with a script of its own. What comes from a
dump is escaped in the block and becomes text on the page, never markup.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from datetime import UTC, datetime
from importlib.resources import files

from flightrec.model import Evidence, Records, Report
from flightrec.render import words
from flightrec.render.board import Board, Cell, GroupBoard, Row, call_text
from flightrec.render.text import verdict_text

FRAMES_MAX = 40
TICK_NS = 100_000  # times on the page are in tenths of a millisecond


def page(records: Records, report: Report, evidence: Evidence, board: Board) -> str:
    """Return the HTML. The same input gives the same bytes."""
    template = files(__package__).joinpath("page.html").read_text()
    script = files(__package__).joinpath("page.js").read_text()
    block = json.dumps(_data(records, report, evidence, board), separators=(",", ":"))
    block = block.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    before, rest = template.split("{{TEXT}}")
    middle, rest = rest.split("{{DATA}}")
    last, after = rest.split("{{SCRIPT}}")
    return before + html.escape(verdict_text(report)) + middle + block + last + script + after


def _data(records: Records, report: Report, evidence: Evidence, board: Board) -> dict[str, object]:
    origin = _origin(board)
    used = _Used(records)
    groups = [_group(records, group, origin, used) for group in board.groups]
    return {
        "report": report.to_json(),
        "kinds": {kind.value: text for kind, text in words.KIND.items()},
        "groups": groups,
        "left_out": board.left_out,
        "calls": [call_text(records.calls[i]) for i in used.calls],
        "sites": [_site(records, i) for i in used.sites],
        "stacks": _stacks(evidence),
        "beside": _beside(records, evidence),
        "problems": [f"{p.source}: {p.what}" if p.source else p.what for p in records.problems],
        "origin": _clock(origin),
    }


class _Used:
    """Numbers the calls and sites that stand on the page, in the order of their first use."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.calls: dict[int, int] = {}
        self.sites: dict[int, int] = {}

    def call(self, index: int) -> int:
        return -1 if index < 0 else self.calls.setdefault(index, len(self.calls))

    def site(self, index: int) -> int:
        if index < 0 or not self._records.sites[index]:
            return -1
        return self.sites.setdefault(index, len(self.sites))


def _group(records: Records, board: GroupBoard, origin: int, used: _Used) -> dict[str, object]:
    places = range(len(board.seqs))
    sites = [_usual_site(board, place) for place in places]
    return {
        "label": board.label,
        "name": str(records.groups[board.group]),
        "p2p": board.is_p2p,
        "hanging": board.is_hanging,
        "seqs": list(board.seqs),
        "calls": [used.call(call) for call in board.calls],
        "sites": [used.site(site) for site in sites],
        "rows": [_row(row, board, sites, origin, used) for row in board.rows],
    }


def _usual_site(board: GroupBoard, place: int) -> int:
    counts = Counter(row.cells[place].site for row in board.rows if row.cells[place])  # type: ignore[union-attr]
    return min(counts, key=lambda site: (-counts[site], site)) if counts else -1


def _row(row: Row, board: GroupBoard, sites: list[int], origin: int, used: _Used) -> list[object]:
    """`[rank, letters, odd calls, odd sites, times in 0.1 ms as steps, durations or null]`."""
    calls: dict[int, int] = {}
    odd_sites: dict[int, int] = {}
    times: list[int | None] = []
    before = 0
    for place, cell in enumerate(row.cells):
        if cell is None or cell.created_ns <= 0:
            times.append(None)
        else:
            at = (cell.created_ns - origin) // TICK_NS
            times.append(at - before)
            before = at
        if cell is not None and cell.call != board.calls[place]:
            calls[place] = used.call(cell.call)
        if cell is not None and cell.site != sites[place]:
            odd_sites[place] = used.site(cell.site)
    return [row.rank, row.letters, calls, odd_sites, times, _durations(row.cells)]


def _durations(cells: tuple[Cell | None, ...]) -> list[float | None] | None:
    known = [
        round(cell.duration_ms, 3) if cell is not None and cell.duration_ms >= 0 else None
        for cell in cells
    ]
    return known if any(value is not None for value in known) else None


def _origin(board: Board) -> int:
    times = (
        cell.created_ns
        for group in board.groups
        for row in group.rows
        for cell in row.cells
        if cell is not None and cell.created_ns > 0
    )
    return min(times, default=0)


def _clock(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if ns else ""


def _site(records: Records, index: int) -> list[str]:
    """Frames as text, the user's innermost line first: it is what a reader looks for."""
    site = records.sites[index]
    lines = [str(frame) for frame in site[:FRAMES_MAX]]
    own = words.user_frame(site)
    first = [str(own)] if own is not None and lines and str(own) != lines[0] else []
    return first + lines


def _stacks(evidence: Evidence) -> dict[int, list[list[object]]]:
    stacks: dict[int, list[list[object]]] = {}
    for stack in evidence.stacks:
        frames = [str(frame) for frame in stack.frames[:FRAMES_MAX]]
        stacks.setdefault(stack.rank, []).append([stack.thread, frames])
    return stacks


def _beside(records: Records, evidence: Evidence) -> dict[int, list[str]]:
    """Sentences about one rank that come from outside its dump."""
    said: dict[int, list[str]] = {}
    for rank in records.missing_ranks:
        said.setdefault(rank, []).append("There is no dump of this rank.")
    for end in evidence.exits:
        how = end.signal or (f"code {end.code}" if end.code is not None else "an unknown code")
        text = f"Its process ended with {how}" + (f": {end.error}" if end.error else "") + "."
        said.setdefault(end.rank, []).append(text)
    for state in evidence.ras:
        text = "NCCL RAS: " + (
            "dead" if state.is_dead else "no answer" if state.is_missing else _counts(state.counts)
        )
        if state.error:
            text += f", {state.error}"
        said.setdefault(state.rank, []).append(text)
    return {rank: said[rank] for rank in sorted(said)}


def _counts(counts: object) -> str:
    known = counts if isinstance(counts, dict) else {}
    return ", ".join(f"{count} {name}" for name, count in known.items() if count) or "no calls yet"
