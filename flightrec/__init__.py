"""Reads flight-recorder dumps and names the guilty rank.

`flightrec.load(paths)` reads, `flightrec.analyze(records)` decides; see `flightrec.model`.
"""

from __future__ import annotations

from collections.abc import Sequence

from flightrec.model import Evidence, Records, Report

__all__ = ["Evidence", "Records", "Report", "analyze", "load"]


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
