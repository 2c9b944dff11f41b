"""Take recorded entries one by one into columns, and keep tables of what repeats."""

from __future__ import annotations

import re
from array import array

from flightrec.model import FLAG_P2P, FLAG_RETIRED, Call, Frame, Site

STATES = {"scheduled": 0, "started": 1, "completed": 2}
_PEER = re.compile(r"^(send|recv) (\d+)(?:->|<-)(\d+|\?)")


class Reducer:
    """Takes entries one by one and keeps columns and tables of distinct calls and sites."""

    def __init__(self) -> None:
        self.group, self.seq, self.p2p_seq = array("H"), array("I"), array("I")
        self.call, self.site = array("I"), array("I")
        self.flags, self.created_ns, self.duration_ms = array("B"), array("q"), array("f")
        self.groups: dict[tuple[object, ...], int] = {}
        self.calls: dict[Call, int] = {}  # in order of their numbers
        self.sites: dict[Site, int] = {}
        self.first_record_id: int | None = None
        self.bad = 0
        self._call_of: dict[object, int] = {}
        self._site_of: dict[object, int] = {}
        self._kept: list[object] = []  # what _site_of knows by identity must not be freed

    def add(self, entry: object) -> None:
        """Take one entry; one that makes no sense is counted in `bad`."""
        self.try_add(entry)

    def try_add(self, entry: object) -> bool:
        try:
            self._add(entry)
        except (TypeError, ValueError, OverflowError, AttributeError, KeyError):
            self.bad += 1
            return False
        return True

    def _add(self, entry: object) -> None:
        if not isinstance(entry, dict):
            raise TypeError
        get = entry.get
        seq = integer(get("collective_seq_id", get("seq_id", 0)))
        p2p_seq = integer(get("p2p_seq_id", 0))
        created_ns, duration = integer(get("time_created_ns", 0)), get("duration_ms")
        call, site = self._call(entry), self._site(get("frames"))
        group = self._group(get("pg_id"), get("process_group"))
        flags = STATES.get(get("state", "scheduled"), 0)
        flags |= FLAG_RETIRED if get("retired") else 0
        flags |= FLAG_P2P if get("is_p2p") else 0
        if not (0 <= seq < 1 << 32 and 0 <= p2p_seq < 1 << 32 and 0 <= created_ns < 1 << 62):
            raise OverflowError
        if self.first_record_id is None:
            self.first_record_id = integer(get("record_id", 0))
        self.group.append(group)
        self.seq.append(seq)
        self.p2p_seq.append(p2p_seq)
        self.call.append(call)
        self.site.append(site)
        self.flags.append(flags)
        self.created_ns.append(created_ns)
        self.duration_ms.append(float(duration) if isinstance(duration, float | int) else -1.0)

    def _group(self, pg_id: object, name: object) -> int:
        key = (pg_id, *name) if isinstance(name, list | tuple) else (pg_id, name or "", "")
        found = self.groups.get(key)
        if found is None:
            found = self.groups[key] = len(self.groups)
        return found

    def _call(self, entry: dict[str, object]) -> int:
        name, sizes_in, sizes_out, dtypes_in, dtypes_out, timeout = map(entry.get, _CALL)
        key = (
            name,
            _hashable_rows(sizes_in),
            _hashable_rows(sizes_out),
            _hashable(dtypes_in),
            _hashable(dtypes_out),
            timeout,
        )
        found = self._call_of.get(key)
        if found is None:
            call = _parse_call(entry)
            found = self._call_of[key] = self.calls.setdefault(call, len(self.calls))
        return found

    def _site(self, frames: object) -> int:
        if not isinstance(frames, list):
            return self.sites.setdefault((), len(self.sites))
        key = tuple(map(id, frames))
        found = self._site_of.get(key)
        if found is None:
            site = tuple(_parse_frame(frame) for frame in frames)
            found = self.sites.setdefault(site, len(self.sites))
            if len(self._kept) < 4096:
                self._kept.extend(frames)
                self._site_of[key] = found
        return found


_CALL = (
    "profiling_name",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "output_dtypes",
    "timeout_ms",
)


def _hashable_rows(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _parse_call(entry: dict[str, object]) -> Call:
    library, colon, name = text(entry.get("profiling_name")).partition(":")
    if not colon:
        library, name = "", library
    peer = own = None
    if match := _PEER.match(name):
        name, own = match[1], int(match[2])
        peer = None if match[3] == "?" else int(match[3])
    timeout = entry.get("timeout_ms")
    return Call(
        library=library,
        op=name,
        peer=peer,
        own=own,
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        input_dtypes=_strings(entry.get("input_dtypes")),
        output_dtypes=_strings(entry.get("output_dtypes")),
        timeout_ms=None if timeout is None else integer(timeout),
    )


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    rows = value if isinstance(value, list | tuple) else ()
    return tuple(tuple(map(integer, row)) if isinstance(row, list | tuple) else () for row in rows)


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(map(text, value)) if isinstance(value, list | tuple) else ()


def _parse_frame(frame: object) -> Frame:
    if not isinstance(frame, dict):
        return Frame(name=text(frame)[:200], filename="", line=0)
    return Frame(
        name=text(frame.get("name")),
        filename=text(frame.get("filename")),
        line=integer(frame.get("line", 0)),
    )


def text(value: object) -> str:
    """A string or number as a string; anything nested as nothing, for printing it could be huge."""
    return str(value) if isinstance(value, str | int | float) else ""


def integer(value: object) -> int:
    """An int, also from the strings that the JSON form writes."""
    if isinstance(value, int):
        return value
    if isinstance(value, str | float):
        return int(value)
    raise TypeError(f"{type(value).__name__} where a number belongs")
