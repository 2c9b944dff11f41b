"""Where a run is saved to, as callers may write it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ckpt.daemon.orders import Destination
from ftcore.base.errors import BadSetting

Where = str | os.PathLike[str] | Destination


def as_destinations(where: Where | Sequence[Where], bytes_per_s: float) -> tuple[Destination, ...]:
    """One or more places as Destinations. `local:PATH` is a disk that only this host sees."""
    if isinstance(where, str | os.PathLike | Destination):
        where = [where]
    found = [_as_destination(w, bytes_per_s) for w in where]
    if not found:
        raise BadSetting("there is no destination", remedy="Name a path or URL to save to.")
    return tuple(found)


def _as_destination(where: Where, bytes_per_s: float) -> Destination:
    if isinstance(where, Destination):
        return where
    text = os.fspath(where)
    private = text.startswith("local:")
    text = text.removeprefix("local:")
    if "://" not in text:
        text = str(Path(text).absolute())
    return Destination(url=text, private=private, bytes_per_s=bytes_per_s)


def run_name(destinations: Sequence[Destination]) -> str:
    """The same for all lives of a training run: where it saves to."""
    urls = "\n".join(d.url for d in destinations)
    return hashlib.blake2b(urls.encode(), digest_size=8).hexdigest()
