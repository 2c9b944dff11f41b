"""Tells a report on one screen of a terminal: verdict, culprit, call, source, why, what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import click

from flightrec.model import Culprit, Report, Verdict
from flightrec.render import words

WIDTH = 80
CULPRITS_MAX = 3
SCREEN_LINES = 24
LABEL = 11
_COLOR = {Verdict.HEALTHY: "green", Verdict.FAULT: "red", Verdict.UNDECIDED: "yellow"}


@dataclass(frozen=True, slots=True)
class _Room:
    """How many lines each part may take."""

    because: int
    waiting: int
    others: int


ROOMY_TO_TIGHT = (_Room(4, 6, 5), _Room(3, 3, 3), _Room(2, 2, 1), _Room(1, 1, 1))


def verdict_text(report: Report, *, color: bool = False, width: int = WIDTH) -> str:
    """Return at most a screen of text, if need be with less of each part."""
    for room in ROOMY_TO_TIGHT:
        lines = _lines(report, room, color, width)
        if len(lines) <= SCREEN_LINES:
            break
    if len(lines) > SCREEN_LINES:
        lines = [*lines[: SCREEN_LINES - 1], lines[-1]]
    return "\n".join(lines) + "\n"


def _lines(report: Report, room: _Room, color: bool, width: int) -> list[str]:
    lines = [*_headline(report, color, width), ""]
    shown = report.culprits[: 1 if len(report.culprits) > CULPRITS_MAX else CULPRITS_MAX]
    for culprit in shown:
        lines += [*_culprit(culprit, room, width), ""]
    if len(report.culprits) > len(shown):
        lines += [*_others(report.culprits[len(shown) :], room, width), ""]
    parts = (
        ("waiting", words.waiting(report, lines_max=room.waiting)),
        ("lacking", report.lacking[: room.others]),
        ("next", report.next_steps[: room.others]),
        ("note", [finding.text for finding in report.findings][: room.others]),
    )
    for label, items in parts:
        if items:
            lines += [*_listed(label, items, width), ""]
    return [*lines, _foot(report)]


def _headline(report: Report, color: bool, width: int) -> Iterator[str]:
    word = words.VERDICT[report.verdict]
    first, *rest = textwrap.wrap(f"{word}  {report.summary}", width) or [word]
    if color:
        first = click.style(word, fg=_COLOR[report.verdict], bold=True) + first[len(word) :]
    yield first
    yield from rest


def _culprit(culprit: Culprit, room: _Room, width: int) -> Iterator[str]:
    yield from _line("culprit", f"rank {culprit.rank} {words.kind(culprit)}", width)
    ranks = f" ({len(culprit.group_ranks)} ranks)" if culprit.group_ranks else ""
    if culprit.op or culprit.seq is not None:
        yield from _line("call", words.call(culprit) + ranks, width)
    if culprit.where:
        yield from _line("where", words.short_path(culprit.where), width)
    because = [words.sentence(text) for text in culprit.because[: room.because]]
    yield from _listed("why", because, width)
    yield from _line("sure", words.sure(culprit.confidence), width)


def _others(culprits: tuple[Culprit, ...], room: _Room, width: int) -> Iterator[str]:
    """Further culprits, those alike on one line."""
    alike: dict[tuple[str, str], list[int]] = {}
    for one in culprits:
        alike.setdefault((words.kind(one), words.call(one)), []).append(one.rank)
    lines = [f"{words.ranks(who)}: {kind}, {call}" for (kind, call), who in alike.items()]
    more = [f"and {len(lines) - room.others} more: see --json"] if len(lines) > room.others else []
    yield from _listed("also", lines[: room.others] + more, width)


def _listed(label: str, items: Iterable[str], width: int) -> Iterator[str]:
    for place, item in enumerate(items):
        yield from _line(label if place == 0 else "", item, width)


def _line(label: str, text: str, width: int) -> Iterator[str]:
    """`  label      text`, wrapped under itself."""
    room = max(20, width - LABEL - 2)
    for place, part in enumerate(textwrap.wrap(text, room) or [""]):
        yield f"  {label if place == 0 else '':<{LABEL}}{part}".rstrip()


def _foot(report: Report) -> str:
    if not report.entries_read:
        return f"{report.ranks_read} ranks spoke, of {report.world_size or 'unknown many'}."
    return f"{report.ranks_read} of {report.world_size} ranks, {report.entries_read:,} entries."
