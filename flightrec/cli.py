"""The frame of the command: its exit codes, and what all its commands share."""

from __future__ import annotations

import glob
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import click

from flightrec.errors import NoDumps
from flightrec.evidence import Beside, collect
from flightrec.logrules import where
from flightrec.model import Finding, Kind, Records, Report, Verdict
from ftcore.base.cli import FtGroup
from ftcore.base.errors import BadSetting, FtError

HEALTHY, FAULT, UNDECIDED, BAD_INPUT, USAGE = 0, 1, 2, 3, 4
EXIT_CODE = {Verdict.HEALTHY: HEALTHY, Verdict.FAULT: FAULT, Verdict.UNDECIDED: UNDECIDED}


class FlightGroup(FtGroup):
    """A command group whose exit codes tell the verdict: 3 is unusable input, 4 wrong usage."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            cause = error.__cause__
            if isinstance(cause, FtError):
                code = USAGE if isinstance(cause, BadSetting) else BAD_INPUT
                setattr(error, "exit_code", code)  # noqa: B010  (a class variable to mypy)
            raise

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, **options: Any
    ) -> Any:
        """Run a command; its return value is the exit code."""
        options["standalone_mode"] = False
        try:
            code = super().main(args, **options)
        except click.UsageError as error:
            error.show()
            _leave(USAGE)
        except click.ClickException as error:
            error.show()
            _leave(error.exit_code)
        except click.Abort:
            _leave(130)
        _leave(code if isinstance(code, int) else 0)


def _leave(code: int) -> NoReturn:
    sys.exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What was read, and what it means."""

    records: Records
    beside: Beside
    report: Report


def examine(
    paths: Sequence[str],
    beside: Beside | None = None,
    *,
    quorum: int | None = None,
    world_size: int | None = None,
) -> Case:
    """Read dumps and evidence and decide. Without any dump, log lines or RAS decide alone.

    Raises NoDumps when `paths` hold neither.
    """
    import flightrec
    from flightrec.logdiag import diagnose_logs

    for path in paths:
        if "://" not in path and not glob.has_magic(path) and not Path(path).exists():
            raise NoDumps(f"{path} does not exist", path=path)
    beside = beside or collect(paths)
    by_logs = beside.has_logs or beside.evidence.ras
    try:
        records = flightrec.load([p for p in paths if p not in beside.files], quorum=quorum)
    except NoDumps:
        if not by_logs:
            raise
        return _by_logs_alone(beside, world_size)
    records = _without(records, beside.files)
    report = flightrec.analyze(records, evidence=beside.evidence)
    if report.verdict is Verdict.UNDECIDED and by_logs:
        spoken = diagnose_logs(beside.book, evidence=beside.evidence, world_size=world_size)
        report = _joined(report, spoken)
    return Case(records=records, beside=beside, report=_with_tracebacks(report, beside))


def _with_tracebacks(report: Report, beside: Beside) -> Report:
    """A rank that raised is shown where it raised, which is nearer to the cause than the call."""
    raised = {
        rank: log.raised
        for rank, log in beside.book.ranks.items()
        if log.raised is not None and log.raised.site and not log.raised.is_communication
    }
    culprits = tuple(
        replace(c, where=where(raised[c.rank].site) or c.where, stack=raised[c.rank].site)
        if c.kind is Kind.DIED and c.rank in raised
        else c
        for c in report.culprits
    )
    return replace(report, culprits=culprits)


def _by_logs_alone(beside: Beside, world_size: int | None) -> Case:
    from flightrec.logdiag import diagnose_logs
    from flightrec.logview import records_of

    report = diagnose_logs(beside.book, evidence=beside.evidence, world_size=world_size)
    return Case(records=records_of(beside.book), beside=beside, report=report)


def _without(records: Records, files: frozenset[str]) -> Records:
    """Files that were read as evidence are no broken dumps."""
    problems = tuple(p for p in records.problems if p.source not in files)
    return replace(records, problems=problems)


def _joined(dumps: Report, logs: Report) -> Report:
    """Dumps that do not decide leave the word to the logs, if these name somebody."""
    if not logs.culprits:
        return dumps
    places = {(one.group, one.seq): one.where for one in dumps.consequences if one.where}
    culprits = tuple(
        replace(one, where=one.where or places.get((one.group, one.seq), ""))
        for one in logs.culprits
    )
    text = f"The dumps alone do not decide ({dumps.summary}) The log lines do."
    notes = tuple(f for f in logs.findings if f.code != "log_only")
    return replace(
        logs,
        culprits=culprits,
        findings=(Finding(code="from_logs", text=text), *notes, *dumps.findings),
        world_size=max(dumps.world_size, logs.world_size),
        ranks_read=dumps.ranks_read,
        entries_read=dumps.entries_read,
    )


def write(path: str, content: str | bytes) -> None:
    """Write an output file. Raises BadSetting when that cannot be done."""
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise BadSetting(f"cannot write {path}: {error.strerror or error}", path=path) from error


def is_colored(color: bool | None) -> bool:
    """Colours go to terminals only, unless asked for."""
    return sys.stdout.isatty() if color is None else color
