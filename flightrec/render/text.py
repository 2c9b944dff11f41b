"""Tells a report on one screen of a terminal: verdict, culprit, call, source, why, what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

import click

from flightrec.model import Culprit, Report, Verdict
from flightrec.render import words

WIDTH = 80
CULPRITS_MAX = 3
BECAUSE_MAX = 4
LABEL = 11
_COLOR = {Verdict.HEALTHY: "green", Verdict.FAULT: "red", Verdict.UNDECIDED: "yellow"}


def verdict_text(report: Report, *, color: bool = False, width: int = WIDTH) -> str:
    """Return at most a screen of text. `color` adds terminal colours."""
    lines = [*_headline(report, color, width), ""]
    shown = report.culprits[: 1 if len(report.culprits) > CULPRITS_MAX else CULPRITS_MAX]
    for culprit in shown:
        lines += [*_culprit(culprit, width), ""]
    if len(report.culprits) > len(shown):
        lines += [*_others(report.culprits[len(shown) :], width), ""]
    if report.consequences:
        lines += [*_listed("waiting", words.waiting(report), width), ""]
    if report.lacking:
        lines += [*_listed("lacking", report.lacking, width), ""]
    if report.next_steps:
        lines += [*_listed("next", report.next_steps, width), ""]
    notes = [finding.text for finding in report.findings]
    if notes:
        more = [f"and {len(notes) - 5} more findings: see --json"] if len(notes) > 5 else []
        lines += [*_listed("note", notes[:5] + more, width), ""]
    lines.append(_foot(report))
    return "\n".join(lines) + "\n"


def _headline(report: Report, color: bool, width: int) -> Iterator[str]:
    word = words.VERDICT[report.verdict]
    first, *rest = textwrap.wrap(f"{word}  {report.summary}", width) or [word]
    if color:
        first = click.style(word, fg=_COLOR[report.verdict], bold=True) + first[len(word) :]
    yield first
    yield from rest


def _culprit(culprit: Culprit, width: int) -> Iterator[str]:
    yield from _line("culprit", f"rank {culprit.rank} {words.kind(culprit)}", width)
    ranks = f" ({len(culprit.group_ranks)} ranks)" if culprit.group_ranks else ""
    if culprit.group or culprit.op:
        yield from _line("call", words.call(culprit) + ranks, width)
    if culprit.where:
        yield from _line("where", words.short_path(culprit.where), width)
    because = culprit.because[:BECAUSE_MAX]
    yield from _listed("why", because, width)
    yield from _line("sure", words.sure(culprit.confidence), width)


def _others(culprits: tuple[Culprit, ...], width: int) -> Iterator[str]:
    """Further culprits, those alike on one line."""
    alike: dict[tuple[str, str], list[int]] = {}
    for one in culprits:
        alike.setdefault((words.kind(one), words.call(one)), []).append(one.rank)
    lines = [f"{words.ranks(who)}: {kind}, {call}" for (kind, call), who in alike.items()]
    more = [f"and {len(lines) - 5} more kinds: see --json"] if len(lines) > 5 else []
    yield from _listed("also", lines[:5] + more, width)


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
