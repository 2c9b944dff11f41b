"""Read whole entries, with all their fields, for those who want to look at them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from flightrec.model import Call, Entry, Site
from flightrec.plainpickle import TornDump, read_plain
from flightrec.reducer import STATES, Reducer, integer, text

_STATE_NAMES = tuple(STATES)


def read_entries(data: bytes, group_index: Sequence[int]) -> list[Entry]:
    """The entries of one dump, oldest first; `group_index` numbers its local groups. Entries that
    make no sense are left out, as in the columns."""
    found: list[object] = []
    if data[:1] == b"\x80":
        try:
            read_plain(data, found.append)
        except TornDump:
            pass
    else:
        top = json.loads(data)
        found = top["entries"] if isinstance(top, dict) else top
    reducer = Reducer()
    kept = [raw for raw in found if isinstance(raw, dict) and reducer.try_add(raw)]
    calls, sites = list(reducer.calls), list(reducer.sites)
    return [_entry(raw, at, reducer, calls, sites, group_index) for at, raw in enumerate(kept)]


def _entry(
    raw: Mapping[str, object],
    at: int,
    reducer: Reducer,
    calls: Sequence[Call],
    sites: Sequence[Site],
    group_index: Sequence[int],
) -> Entry:
    duration = raw.get("duration_ms")
    return Entry(
        record_id=_number(raw, "record_id") or 0,
        group=group_index[reducer.group[at]],
        seq=reducer.seq[at],
        p2p_seq=reducer.p2p_seq[at],
        op_id=_number(raw, "op_id") or 0,
        call=calls[reducer.call[at]],
        site=sites[reducer.site[at]],
        state=_STATE_NAMES[reducer.flags[at] & 3],
        is_p2p=bool(raw.get("is_p2p")),
        is_retired=bool(raw.get("retired")),
        created_ns=reducer.created_ns[at],
        started_ns=_number(raw, "time_discovered_started_ns"),
        completed_ns=_number(raw, "time_discovered_completed_ns"),
        duration_ms=float(duration) if isinstance(duration, int | float) else None,
        thread=text(raw.get("thread_name")),
    )


def _number(raw: Mapping[str, object], key: str) -> int | None:
    """None also for 0, which the JSON form writes for a time that is not known."""
    value = raw.get(key)
    try:
        return integer(value) or None
    except (TypeError, ValueError):
        return None
