"""Turn one rank's dump into columns: every version and writer of the format becomes one form."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import compress

from flightrec.errors import BadDump
from flightrec.fastlane import FastLane
from flightrec.model import Call, Columns, Frontier, Site
from flightrec.plainpickle import TornDump, read_plain
from flightrec.reducer import Reducer, integer, text

RANKS_MAX = 1 << 20  # more members than this is a broken or hostile file
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGroup:
    """A process group as one rank's file describes it; `ranks` is None where the file is silent."""

    pg_id: int | None  # counts per process; None: configured but never used
    name: str
    desc: str
    ranks: tuple[int, ...] | None
    frontier: Frontier | None = None
    is_global: bool = False  # its ranks are those of the job, whatever the default group says


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One file's content, still with this file's own numbering of groups, calls and sites."""

    version: str
    library: str
    rank: int | None  # when the file says it
    rank_hint: int | None  # what its sends and receives in the default group show
    groups: tuple[LocalGroup, ...]
    calls: tuple[Call, ...]
    sites: tuple[Site, ...]
    columns: Columns
    first_record_id: int
    problems: tuple[str, ...] = ()
    host: str = ""


def read_dump(data: bytes) -> Dump:
    """Return the dump in `data`, a pickle or JSON. Raises BadDump if it is neither."""
    reducer, top, problems = _read(data)
    if isinstance(top, list):
        top = {"entries": top} if any(isinstance(e, dict) for e in top) else None
    if not isinstance(top, dict) or not (reducer.seq or _looks_like_dump(top)):
        raise BadDump("the content is not a flight-recorder dump")
    entries = top.get("entries")
    for entry in entries if isinstance(entries, list) else ():
        if entry is not None:
            reducer.add(entry)
    return _finish(top, reducer, problems)


def _read(data: bytes) -> tuple[Reducer, object, list[str]]:
    if data[:1] != b"\x80":
        return Reducer(), _read_json(data), []
    for with_lane in (True, False):
        reducer = Reducer()
        try:
            lane = FastLane(data, reducer) if with_lane else None
            return reducer, read_plain(data, reducer.add, lane), []
        except TornDump as error:
            what = f"{error}; {len(reducer.seq)} entries before the tear are used"
            return reducer, _salvaged(error.facts.get("top")), [what]
        except BadDump:
            # Entries that share objects in ways the lane does not follow: read without it.
            if not with_lane:
                raise
    raise AssertionError("unreachable")


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


def _finish(top: Mapping[str, object], reducer: Reducer, problems: list[str]) -> Dump:
    if reducer.bad:
        problems.append(f"{reducer.bad} entries made no sense and were left out")
    calls = tuple(reducer.calls)
    library = next((call.library for call in calls if call.library), "")
    rank = top.get("rank", top.get("global_rank"))
    live = _live_groups(top)
    return Dump(
        version=text(top.get("version")),
        library=library,
        rank=rank if isinstance(rank, int) else None,
        rank_hint=_rank_from_p2p(reducer),
        groups=_groups(top, reducer, live),
        calls=calls,
        sites=tuple(reducer.sites),
        columns=_without_dead_groups(_columns(reducer), list(reducer.groups), live),
        first_record_id=reducer.first_record_id or 0,
        problems=tuple(problems),
        host=text(top.get("host")),
    )


def _columns(reducer: Reducer) -> Columns:
    return Columns(
        group=reducer.group,
        seq=reducer.seq,
        p2p_seq=reducer.p2p_seq,
        call=reducer.call,
        site=reducer.site,
        flags=reducer.flags,
        created_ns=reducer.created_ns,
        duration_ms=_kept_if_any(reducer.duration_ms),
    )


def _live_groups(top: Mapping[str, object]) -> dict[str, dict[str, tuple[int, ...]]]:
    """What `annotated` wrote: description -> name -> global ranks."""
    return {
        desc: {name: parse_ranks(ranks) for name, ranks in _mapping(named).items()}
        for desc, named in _mapping(top.get("live_groups")).items()
    }


def _without_dead_groups(
    columns: Columns,
    groups: Sequence[tuple[object, ...]],
    live: Mapping[str, Mapping[str, object]],
) -> Columns:
    """Leave out the entries of groups whose like live now, but not they."""
    dead = {i for i, key in enumerate(groups) if _is_dead(key, live)}
    if not dead:
        return columns
    kept = bytes(group not in dead for group in columns.group)
    arrays = {c.name: getattr(columns, c.name) for c in fields(Columns)}
    return Columns(**{n: array(a.typecode, compress(a, kept)) for n, a in arrays.items()})


def _is_dead(key: tuple[object, ...], live: Mapping[str, Mapping[str, object]]) -> bool:
    _, name, *rest = key
    desc = text(rest[0]) if rest else ""
    return desc in live and text(name) not in live[desc]


def _kept_if_any(durations: array[float]) -> array[float]:
    return durations if any(d >= 0 for d in durations) else array("f")


def _rank_from_p2p(reducer: Reducer) -> int | None:
    """The own end of sends and receives in the default group: "send 0->1" was written by rank 0."""
    ends = {i: call.own for i, call in enumerate(reducer.calls) if call.own is not None}
    default = {i for i, key in enumerate(reducer.groups) if key[-1] == "default_pg"}
    if not ends or not default:
        return None
    used = set(zip(reducer.group, reducer.call, strict=True))
    own = {ends[call] for group, call in used if group in default and call in ends}
    return own.pop() if len(own) == 1 else None


def _groups(
    top: Mapping[str, object],
    reducer: Reducer,
    live: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> tuple[LocalGroup, ...]:
    """The groups that have entries, in order of first use, then those only configured."""
    configured = _configured(top.get("pg_config"))
    status = _mapping(top.get("pg_status"))
    groups = []
    for pg_id, name, *rest in reducer.groups:
        desc = text(rest[0]) if rest else ""
        known = live.get(desc, {}).get(text(name))
        groups.append(
            LocalGroup(
                pg_id=pg_id if isinstance(pg_id, int) else None,
                name=text(name),
                desc=desc,
                ranks=known or _ranks_of(configured, text(name), desc),
                frontier=_frontier(status.get(text(pg_id))),
                is_global=known is not None,
            )
        )
    used = {group.name for group in groups}
    named = {name for by_name in live.values() for name in by_name}
    for name, (desc, ranks) in configured.items():
        if name not in used | named and ranks and name:
            groups.append(LocalGroup(pg_id=None, name=name, desc=desc, ranks=ranks))
    for desc, by_name in live.items():
        groups += [
            LocalGroup(pg_id=None, name=name, desc=desc, ranks=ranks, is_global=True)
            for name, ranks in by_name.items()
            if name not in used
        ]
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
