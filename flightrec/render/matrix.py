"""The matrix ranks × calls for a terminal; ranks that look alike share a line."""

from __future__ import annotations

from collections.abc import Iterator

import click

from flightrec.model import Records
from flightrec.render import words
from flightrec.render.board import Board, GroupBoard, call_text

GLYPH = {"c": "·", "s": "S", "w": "W", "n": " ", "o": "~", "x": "?"}
COLOR = {"c": "green", "s": "yellow", "w": "red", "n": "white", "o": "white", "x": "magenta"}
LEGEND = "· completed  S started  W waiting  ! unlike the others  ~ overwritten  ? no dump"
GROUPS_SHOWN = 8


def matrix_text(records: Records, board: Board, *, color: bool = False, width: int = 80) -> str:
    """Return the matrices of the groups that matter most, with a legend."""
    lines = [LEGEND, ""]
    for group in board.groups[:GROUPS_SHOWN]:
        lines += [*_group(records, group, color, width), ""]
    rest = len(board.groups) - GROUPS_SHOWN + board.left_out
    if rest > 0:
        lines.append(f"{rest} more groups: see --html")
    return "\n".join(lines) + "\n"


def _group(records: Records, board: GroupBoard, color: bool, width: int) -> Iterator[str]:
    label_width = min(24, max((len(words.spans(who)) for _, who in _alike(board)), default=4) + 6)
    room = max(10, width - label_width - 2)
    skip = max(0, len(board.seqs) - room)
    seqs, calls = board.seqs[skip:], board.calls[skip:]
    if board.is_p2p:
        heading = f"each rank's last {len(seqs)}, newest at the right"
    else:
        heading = f"calls {seqs[0]} to {seqs[-1]}" if seqs else "no calls"
    yield f"{board.label}, {len(board.rows)} ranks, {heading}"
    for letters, who in _alike(board):
        label = ("rank " if len(who) == 1 else "ranks ") + words.spans(who)
        yield f"{label[:label_width]:<{label_width}} {_paint(letters[skip:], color)}"
    first = next((i for i in range(len(seqs)) if _is_open(board, skip + i)), None)
    if first is not None and not board.is_p2p and calls[first] >= 0:
        yield f"first open: #{seqs[first]} {call_text(records.calls[calls[first]])}"


def _alike(board: GroupBoard) -> list[tuple[str, list[int]]]:
    """Rows with equal letters together, in the order of their lowest rank."""
    alike: dict[str, list[int]] = {}
    for row in sorted(board.rows, key=lambda row: row.rank):
        alike.setdefault(row.letters, []).append(row.rank)
    return list(alike.items())


def _is_open(board: GroupBoard, place: int) -> bool:
    return any(row.letters[place].lower() in "ws" for row in board.rows)


def _paint(letters: str, color: bool) -> str:
    glyphs = ["!" if letter.isupper() else GLYPH[letter] for letter in letters]
    if not color:
        return "".join(glyphs).rstrip()
    return "".join(
        click.style(glyph, fg=COLOR[letter.lower()]) if glyph.strip() else glyph
        for glyph, letter in zip(glyphs, letters, strict=True)
    )
