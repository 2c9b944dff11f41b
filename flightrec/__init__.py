"""Reads flight-recorder dumps and names the guilty rank.

`flightrec.load(paths)` reads, `flightrec.analyze(records)` decides; see `flightrec.model`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

from flightrec.model import Evidence, Records, Report

__all__ = [
    "Evidence",
    "Records",
    "Report",
    "analyze",
    "dump_on_request",
    "load",
    "warm_recorder",
    "watch_job",
]


def load(paths: Sequence[str], *, quorum: int | None = None) -> Records:
    """Read the dumps in files, folders, globs, archives and URLs. Raises NoDumps if there is none.

    With torchft's quorum folders the newest one is read, or the one given.
    """
    from flightrec.loading import load_paths

    return load_paths(paths, quorum=quorum)


def analyze(records: Records, *, evidence: Evidence | None = None) -> Report:
    """Decide who caused what. The same records and evidence give the same report."""
    from flightrec.diagnosis import diagnose

    return diagnose(records, evidence or Evidence())


def warm_recorder() -> threading.Thread:
    """Do the slow part of the first dump in a background thread; call it once at start-up."""
    from flightrec.record import warm_recorder

    return warm_recorder()


def dump_on_request(prefix: str, rank: int) -> AbstractContextManager[object]:
    """While the block runs, a byte written to `PREFIX<rank>.pipe` makes this process dump."""
    from flightrec.record import DumpOnRequest

    return DumpOnRequest(prefix, rank)


def watch_job(
    pipes: str,
    *,
    dumps: str | None = None,
    out: str | None = None,
    wait_s: float = 15.0,
    ras: tuple[str, int] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Make all ranks that listen at `PIPES<rank>.pipe` dump, and decide who hangs and why.

    `dumps` is the prefix of their dump files, if it is another one. Blocks up to `wait_s` and some
    seconds for stacks; run it in a thread. Raises NoPipes and NoDumps.
    """
    from flightrec.watch import find_listeners, watch

    listeners = find_listeners(pipes, dumps)
    return watch(listeners, out=out, wait_s=wait_s, ras=ras, notes=notes).report
