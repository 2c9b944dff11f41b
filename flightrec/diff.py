"""Compares two ranks call by call, or two runs rank by rank: where do they first differ?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flightrec.errors import NoSuchRank
from flightrec.model import Entry, Records
from flightrec.render import words
from flightrec.render.board import call_text
from flightrec.show import require_rank
from ftcore.base.errors import BadSetting

CONTEXT = 3  # equal calls shown before the first difference
RANKS_SHOWN = 8
AFTER = 6  # calls of both sides shown from there on


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first call of one group in which two ranks differ; None where a side has no call."""

    group: str
    place: int  # index into the common sequence numbers
    left: tuple[Entry, ...]
    right: tuple[Entry, ...]
    before: tuple[Entry, ...]
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDiff:
    """Two ranks, group by group. Groups are joined by description and, if need be, by order."""

    left: str
    right: str
    compared: int
    differences: tuple[Difference, ...]


def diff_ranks(left: Records, left_rank: int, right: Records, right_rank: int) -> RankDiff:
    """Compare the calls of two ranks, which may come from two runs, where both recorded them."""
    ours, theirs = _by_group(left, left_rank), _by_group(right, right_rank)
    differences, compared = [], 0
    for label in sorted(set(ours) & set(theirs)):
        one, two = _overlap(ours[label], theirs[label])
        compared += min(len(one), len(two))
        if (found := _first(label, one, two)) is not None:
            differences.append(found)
    return RankDiff(
        left=f"rank {left_rank}",
        right=f"rank {right_rank}",
        compared=compared,
        differences=tuple(differences),
    )


def _by_group(records: Records, rank: int) -> dict[str, list[Entry]]:
    """Calls by the group's label; a second group of the same description gets a number."""
    labels: dict[int, str] = {}
    calls: dict[str, list[Entry]] = {}
    for entry in records.entries(rank):
        if entry.group not in labels:
            name = str(records.groups[entry.group])
            same = sum(label.split(" (")[0] == name for label in labels.values())
            labels[entry.group] = f"{name} ({same + 1})" if same else name
        calls.setdefault(labels[entry.group], []).append(entry)
    return calls


def _overlap(one: list[Entry], two: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Drop what only one side still has: a ring that wrapped lost its oldest calls."""
    first = max(one[0].seq, two[0].seq)
    return [e for e in one if e.seq >= first], [e for e in two if e.seq >= first]


def _first(label: str, one: Sequence[Entry], two: Sequence[Entry]) -> Difference | None:
    shorter = min(len(one), len(two))
    place = next((i for i in range(shorter) if _unlike(one[i], two[i])), shorter)
    if place == len(one) == len(two):
        return None
    what = _unlike(one[place], two[place]) if place < shorter else "one side made no further call"
    return Difference(
        group=label,
        place=place,
        left=tuple(one[place : place + AFTER]),
        right=tuple(two[place : place + AFTER]),
        before=tuple(one[max(0, place - CONTEXT) : place]),
        what=what,
    )


def _unlike(one: Entry, two: Entry) -> str:
    """What differs, in a word; empty when alike. A place in the code weighs less than a call."""
    if one.call.op != two.call.op:
        return "another operation"
    if one.is_p2p:
        return ""  # partners differ by nature
    sides = ((one.call.input_sizes, two.call.input_sizes),)
    if any(a != b for a, b in sides):
        return "another size"
    if one.call.input_dtypes != two.call.input_dtypes:
        return "another dtype"
    if one.site and two.site and _lines(one) != _lines(two):
        return "called from another line"
    return ""


def _lines(entry: Entry) -> list[tuple[str, int]]:
    """The call path by file name and line: two hosts may have the code in two places."""
    return [(frame.filename.rsplit("/", 1)[-1], frame.line) for frame in entry.site]


def diff_text(diff: RankDiff) -> str:
    """Tell the differences, the calls of both sides next to each other."""
    if not diff.differences:
        return f"{diff.left} and {diff.right} made the same {diff.compared} calls.\n"
    lines = []
    for one in diff.differences:
        seq = (one.left or one.right)[0].seq
        lines += [f"{one.group}, call #{seq}: {one.what}", *_side_by_side(diff, one), ""]
    return "\n".join(lines)


def _side_by_side(diff: RankDiff, one: Difference) -> Iterator[str]:
    yield f"    {diff.left:<44}{diff.right}"
    for entry in one.before:
        yield f"    {_cell(entry)}"
    for i in range(max(len(one.left), len(one.right))):
        left = _cell(one.left[i]) if i < len(one.left) else "-"
        right = _cell(one.right[i]) if i < len(one.right) else "-"
        yield f"{'>' if i == 0 else ' '}   {left:<44}{right}"


def _cell(entry: Entry) -> str:
    frame = words.user_frame(entry.site)
    place = f" {frame.filename.rsplit('/', 1)[-1]}:{frame.line}" if frame else ""
    return f"#{entry.seq} {call_text(entry.call)}"[: 43 - len(place)] + place


def diff_paths(left: str, right: str, *, ranks: str | None = None) -> tuple[str, bool]:
    """Compare two dumps, or the ranks that two folders share. Return the text, and whether they
    are the same. Raises BadSetting when `ranks` is not `A,B`."""
    from flightrec.loading import load_paths

    one, two = load_paths([left]), load_paths([right])
    pairs = _pairs(one, two, ranks)
    diffs = [diff_ranks(one, a, two, b) for a, b in pairs]
    unlike = [diff for diff in diffs if diff.differences]
    if len(diffs) == 1:
        return diff_text(diffs[0]), not unlike
    head = f"{len(diffs)} ranks compared, {len(unlike)} differ"
    shown = "".join(diff_text(diff) for diff in unlike[:RANKS_SHOWN])
    rest = f"and {len(unlike) - RANKS_SHOWN} more ranks\n" if len(unlike) > RANKS_SHOWN else ""
    return f"{head}\n{shown}{rest}", not unlike


def _pairs(one: Records, two: Records, ranks: str | None) -> list[tuple[int, int]]:
    if ranks is not None:
        parts = ranks.split(",")
        if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
            raise BadSetting(f"--ranks {ranks} is not two numbers like 0,3", ranks=ranks)
        pair = int(parts[0]), int(parts[1])
        for records, rank in zip((one, two), pair, strict=True):
            require_rank(records, rank)
        return [pair]
    if len(one.ranks) == 1 and len(two.ranks) == 1:
        return [(min(one.ranks), min(two.ranks))]
    both = sorted(set(one.ranks) & set(two.ranks))
    if not both:
        raise NoSuchRank("the two sides share no rank; choose with --ranks A,B")
    return [(rank, rank) for rank in both]
