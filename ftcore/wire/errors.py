"""Errors of the wire."""

from __future__ import annotations

from ftcore.base.errors import FtError


class BadMessage(FtError):
    """Bytes that are no message of this protocol, or one that cannot be true."""

    remedy = (
        "Check that both sides run the same ftcore version and that nothing else talks to "
        "this port."
    )
