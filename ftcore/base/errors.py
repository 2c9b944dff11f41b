"""Errors that say what happened and what to do. Shared by all four packages."""

from __future__ import annotations


class FtError(Exception):
    """Base of every error raised on purpose.

    `str(error)` is one sentence of what happened, with the numbers. `remedy` is what the
    reader should do next, and `facts` the same numbers for logs and machines.
    """

    remedy: str = ""
    retryable: bool = False

    def __init__(self, what: str, *, remedy: str | None = None, **facts: object) -> None:
        super().__init__(what)
        self.facts = facts
        if remedy is not None:
            self.remedy = remedy


class BadSetting(FtError):
    """An option, argument or environment variable has a value that cannot work."""

    remedy = "Correct the value named above; `--help` lists the options with units and defaults."
