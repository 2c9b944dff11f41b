"""Turn one rank's dump into columns: every version and writer of the format becomes one form."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flightrec.errors import BadDump
from flightrec.model import FLAG_P2P, FLAG_RETIRED, Call, Columns, Frame, Frontier, Site
from flightrec.plainpickle import TornDump, read_plain

STATES = {"scheduled": 0, "started": 1, "completed": 2}
RANKS_MAX = 1 << 20  # more members than this is a broken or hostile file
_PEER = re.compile(r"^(send|recv) (\d+)(?:->|<-)(\d+|\?)")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGroup:
    """A process group as one rank's file describes it; `ranks` is None where the file is silent."""

    pg_id: int | None  # counts per process; None: configured but never used
    name: str
    desc: str
    ranks: tuple[int, ...] | None
    frontier: Frontier | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One file's content, still with this file's own numbering of groups, calls and sites."""

    version: str
    library: str
    rank_hint: int | None  # the rank, when the content tells
    groups: tuple[LocalGroup, ...]
    calls: tuple[Call, ...]
    sites: tuple[Site, ...]
    columns: Columns
    first_record_id: int
    problems: tuple[str, ...] = ()


def read_dump(data: bytes) -> Dump:
    """Return the dump in `data`, a pickle or JSON. Raises BadDump if it is neither."""
    reducer = Reducer()
    problems: list[str] = []
    if data[:1] == b"\x80":
        try:
            top = read_plain(data, reducer.add)
        except TornDump as error:
            top = _salvaged(error.facts.get("top"))
            problems.append(f"{error}; {len(reducer.seq)} entries before the tear are used")
    else:
        top = _read_json(data)
    if isinstance(top, list):
        top = {"entries": top}
    if not isinstance(top, dict) or not (reducer.seq or _looks_like_dump(top)):
        raise BadDump("the content is not a flight-recorder dump")
    entries = top.get("entries")
    for entry in entries if isinstance(entries, list) else ():
        if entry is not None:
            reducer.add(entry)
    return _finish(top, reducer, problems)


def _looks_like_dump(top: Mapping[str, object]) -> bool:
    return "pg_config" in top or "entries" in top or ("version" in top and "pg_status" in top)


def _read_json(data: bytes) -> object:
    if data.lstrip()[:1] not in (b"{", b"["):
        raise BadDump("the file is neither a pickle of protocol 2 or later nor JSON")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadDump(f"the JSON cannot be read: {error}") from error


def _salvaged(stack: object) -> dict[str, object]:
    """The top-level keys that were complete when the pickle tore."""
    rest = stack[1:] if isinstance(stack, list) else []
    top = {}
    for key, value in zip(rest[::2], rest[1::2], strict=False):
        if not isinstance(key, str):
            break
        top[key] = value
    return top


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


def _finish(top: Mapping[str, object], reducer: Reducer, problems: list[str]) -> Dump:
    if reducer.bad:
        problems.append(f"{reducer.bad} entries made no sense and were left out")
    calls = tuple(reducer.calls)
    library = next((call.library for call in calls if call.library), "")
    hint = top.get("rank", top.get("global_rank"))
    return Dump(
        version=text(top.get("version")),
        library=library,
        rank_hint=hint if isinstance(hint, int) else _rank_from_p2p(reducer),
        groups=_groups(top, reducer),
        calls=calls,
        sites=tuple(reducer.sites),
        columns=Columns(
            group=reducer.group,
            seq=reducer.seq,
            p2p_seq=reducer.p2p_seq,
            call=reducer.call,
            site=reducer.site,
            flags=reducer.flags,
            created_ns=reducer.created_ns,
            duration_ms=_kept_if_any(reducer.duration_ms),
        ),
        first_record_id=reducer.first_record_id or 0,
        problems=tuple(problems),
    )


def _kept_if_any(durations: array[float]) -> array[float]:
    return durations if any(d >= 0 for d in durations) else array("f")


def _rank_from_p2p(reducer: Reducer) -> int | None:
    """The own end of a send or recv in the default group: "send 0->1" was written by rank 0."""
    for key in reducer.groups:
        if key[-1] == "default_pg":
            own = {call.own for call in reducer.calls if call.own is not None}
            return own.pop() if len(reducer.groups) == 1 and len(own) == 1 else None
    return None


def _groups(top: Mapping[str, object], reducer: Reducer) -> tuple[LocalGroup, ...]:
    """The groups that have entries, in order of first use, then those only configured."""
    configured = _configured(top.get("pg_config"))
    status = _mapping(top.get("pg_status"))
    groups = []
    for pg_id, name, *rest in reducer.groups:
        desc = text(rest[0]) if rest else ""
        ranks = _ranks_of(configured, text(name), desc)
        groups.append(
            LocalGroup(
                pg_id=pg_id if isinstance(pg_id, int) else None,
                name=text(name),
                desc=desc,
                ranks=ranks,
                frontier=_frontier(status.get(text(pg_id))),
            )
        )
    used = {group.name for group in groups}
    for name, (desc, ranks) in configured.items():
        if name not in used and ranks and name:
            groups.append(LocalGroup(pg_id=None, name=name, desc=desc, ranks=ranks))
    return tuple(groups)


def _ranks_of(
    configured: Mapping[str, tuple[str, tuple[int, ...]]], name: str, desc: str
) -> tuple[int, ...] | None:
    """gloo writes its first group under the empty name, before the group has one."""
    if name in configured:
        return configured[name][1] or None
    if desc == "default_pg" and "" in configured:
        return configured[""][1] or None
    return None


def _configured(value: object) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for key, config in _mapping(value).items():
        fields = _mapping(config)
        ranks = fields.get("ranks", config if isinstance(config, list | str) else "")
        found[text(fields.get("name", key))] = (text(fields.get("desc")), parse_ranks(ranks))
    return found


def parse_ranks(value: object) -> tuple[int, ...]:
    """Member ranks from "[0, 1]" or a list; never evaluated."""
    if isinstance(value, str):
        return tuple(int(number) for number in _NUMBER.findall(value)[:RANKS_MAX])
    if isinstance(value, Iterable):
        return tuple(item for item in value if isinstance(item, int))[:RANKS_MAX]
    return ()


def _frontier(value: object) -> Frontier | None:
    fields = _mapping(value)
    if not fields:
        return None
    try:
        return Frontier(
            last_enqueued=integer(fields.get("last_enqueued_collective", -1)),
            last_started=integer(fields.get("last_started_collective", -1)),
            last_completed=integer(fields.get("last_completed_collective", -1)),
        )
    except (TypeError, ValueError):
        return None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
