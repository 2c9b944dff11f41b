"""Write into a dump what the recorder does not know: whose it is, and which groups live now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Live = Mapping[str, Mapping[str, Sequence[int]]]  # description -> name -> global ranks


def annotated(data: bytes, *, rank: int, host: str = "", live_groups: Live) -> bytes:
    """Return the dump with its rank, host and live groups in it; a torn dump comes back as it is.

    live_groups: of the groups with these descriptions only the named ones live, with these global
    ranks as members. What the ring still holds of others with the same description is over: groups
    that are rebuilt for each quorum leave their aborted calls behind.
    """
    ranks = {desc: {n: str(list(r)) for n, r in by.items()} for desc, by in live_groups.items()}
    more = {"rank": rank, "host": host, "live_groups": ranks}
    if data[:1] == b"{":
        return json.dumps({**json.loads(data), **more}).encode()
    if data[:1] != b"\x80" or data[-1:] != b".":
        return data
    # The pickle ends with the finished dict on its stack and STOP: put more items into it first.
    return data[:-1] + b"(" + _items(more) + b"u."


def _items(value: Mapping[str, object]) -> bytes:
    return b"".join(_pickled(key) + _pickled(item) for key, item in value.items())


def _pickled(value: object) -> bytes:
    """Instructions that build a string, an int or a dict of such, in protocol 2."""
    if isinstance(value, Mapping):
        return b"}(" + _items(value) + b"u"
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = str(value).encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw
