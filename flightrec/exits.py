"""Reads how each rank's process ended: from JSON, from plain lines, or from what logs show."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace

from flightrec.errors import BadEvidence
from flightrec.logbook import LogBook, RankLog
from flightrec.model import Exit

_LINE = re.compile(r"^\s*(?:rank\s*)?(\d+)\s*[:=,\s]\s*(.+?)\s*$", re.IGNORECASE)
_CODE = re.compile(r"(?:exit(?:ed|code| code)?\s*[:=]?\s*)?(-?\d+)\b")
_SIGNAL = re.compile(r"\bSIG[A-Z]+\d*\b")
ECHOES = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGABRT}  # launcher's stop, watchdog's abort


def read_exits(text: str, *, source: str = "") -> tuple[Exit, ...]:
    """Read JSON by rank (`{"0": -6, "2": {"signal": "SIGKILL"}}`) or lines (`rank 2: SIGKILL`)."""
    if text.lstrip()[:1] in "{[":
        try:
            return _first_causes(tuple(_from_json(json.loads(text))))
        except ValueError as error:
            raise BadEvidence(f"{source or 'the exit codes'}: {error}", source=source) from error
    found = (_LINE.match(line) for line in text.splitlines())
    return _first_causes(tuple(_exit(int(m[1]), m[2]) for m in found if m))


def exits_from_logs(book: LogBook) -> tuple[Exit, ...]:
    """What logs say of ends: the launcher's table, and tracebacks of a rank's own."""
    table = {e.rank: e for e in book.exits}
    exits = []
    for rank in sorted(set(table) | set(book.ranks)):
        raised = book.ranks[rank].raised if rank in book.ranks else None
        ended = table.get(rank)
        own = raised is not None and not raised.is_communication
        if ended is None and not (own and _has_left(book.ranks[rank])):
            continue
        exits.append(
            Exit(
                rank=rank,
                code=ended.code if ended else 1,
                signal=_signal_name(ended.code) if ended else "",
                is_first_cause=own or bool(ended and ended.is_first and raised is None),
                error=raised.text if raised else "",
            )
        )
    return tuple(exits)


def _has_left(log: RankLog) -> bool:
    """A traceback ends the process, unless the rank is heard of afterwards."""
    return not log.is_waiting and not log.has_answered


def _from_json(value: object) -> Iterator[Exit]:
    if isinstance(value, dict):
        value = [{"rank": rank, "how": how} for rank, how in value.items()]
    if not isinstance(value, list):
        raise ValueError("a list or an object by rank is expected")
    for one in value:
        if not isinstance(one, dict) or "rank" not in one:
            raise ValueError("each exit needs a rank")
        rank, how = int(one["rank"]), one.get("how", one)
        if isinstance(how, list):  # [how, seconds], as some launchers write
            at = how[1] if len(how) > 1 and isinstance(how[1], int | float) else None
            yield replace(_exit(rank, str(how[0]) if how else ""), at_s=at)
        elif isinstance(how, dict):
            yield _from_object(rank, how)
        else:
            yield _exit(rank, str(how))


def _from_object(rank: int, how: dict[str, object]) -> Exit:
    code, at = how.get("code"), how.get("at_s")
    return Exit(
        rank=rank,
        code=code if isinstance(code, int) else None,
        signal=str(how.get("signal") or (_signal_name(code) if isinstance(code, int) else "")),
        at_s=float(at) if isinstance(at, int | float) else None,
        is_first_cause=how.get("is_first_cause") is True,
        error=str(how.get("error") or ""),
    )


def _exit(rank: int, how: str) -> Exit:
    """`signal SIGKILL`, `exit 1`, `-9`, `killed by the launcher`, `running`."""
    if named := _SIGNAL.search(how):
        number = getattr(signal, named[0], None)
        return Exit(rank=rank, code=-int(number) if number else None, signal=named[0])
    if "launcher" in how:
        return Exit(rank=rank, code=-int(signal.SIGTERM), signal="SIGTERM")
    found = _CODE.search(how)
    code = int(found[1]) if found else None
    return Exit(rank=rank, code=code, signal=_signal_name(code))


def _signal_name(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _first_causes(exits: tuple[Exit, ...]) -> tuple[Exit, ...]:
    """Order by rank; when times are known, the earliest end that nobody ordered is the cause."""
    ordered = sorted(exits, key=lambda e: e.rank)
    own = [e for e in ordered if e.code not in (0, None) and e.code not in ECHOES]
    timed = [e for e in own if e.at_s is not None]
    if any(e.is_first_cause for e in ordered) or not timed or len(timed) != len(own):
        return tuple(ordered)
    first = min(timed, key=lambda e: (e.at_s or 0.0, e.rank))
    return tuple(replace(e, is_first_cause=True) if e is first else e for e in ordered)
