"""Rewrites dumps and logs so that they can be published: what a diagnosis needs stays, names go.

Kept: operations, sizes, dtypes, numbers, states, times relative to each other, line numbers,
members of groups, frames inside torch. Replaced, alike in all files: the user's file and function
names, group names of one's own, threads, hosts, addresses, exception texts. The verdict on the
result is the verdict on the original, with other names.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flightrec.errors import BadDump, NoDumps
from flightrec.evidence import evidence_files, lines_of_file
from flightrec.logs import is_echo, rank_from_name, understands
from flightrec.plainpickle import TornDump, read_plain
from flightrec.sources import Source, find_sources, read_many
from ftcore.base.errors import BadSetting

BASE_NS = 1_700_000_000_000_000_000  # where the shifted clock starts
PUBLIC_GROUPS = {"", "default_pg", "undefined", "tp", "dp", "pp", "ep", "cp", "sp", "fsdp", "world"}
PUBLIC_THREADS = ("python", "pt_")
_TORCH = re.compile(r"^.*/((?:site-packages|dist-packages|pytorch)/torch/.*)$")
_NUMBERED = re.compile(r"^\d+$")


class Names:
    """Hands out one alias per name, numbered in the order of first use."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, str]] = {}

    def alias(self, kind: str, name: str, suffix: str = "") -> str:
        known = self._of.setdefault(kind, {})
        return known.setdefault(name, f"{kind}{len(known) + 1}{suffix}")

    def group(self, name: str) -> str:
        public = name in PUBLIC_GROUPS or _NUMBERED.match(name)
        return name if public else self.alias("group", name)

    def thread(self, name: str) -> str:
        return name if name.startswith(PUBLIC_THREADS) or not name else self.alias("thread", name)

    def file(self, path: str) -> str:
        if found := _TORCH.match(path):
            return found[1]
        return path if path.startswith("<") else self.alias("file", path, ".py")

    def function(self, name: str, path: str) -> str:
        is_public = _TORCH.match(path) or name.startswith("<")
        return name if is_public else self.alias("function", name)


def anonymize_paths(paths: Sequence[str], out: str) -> list[str]:
    """Write an anonymous copy of every dump and log under `paths` into the folder `out`.

    Returns the files written. Raises NoDumps when there is nothing, BadSetting when `out` holds
    something already. A torn dump is written with what could be read of it.
    """
    if Path(out).exists() and any(Path(out).iterdir()):
        raise BadSetting(f"{out} is not empty; name a new folder with --out", out=out)
    logs = [path for path in evidence_files(paths) if path.kind == "log"]
    names = Names()
    log_paths = {log.path for log in logs}
    sources = [source for source in find_sources(paths) if source.path not in log_paths]
    written = _write_dumps(sources, out, names)
    for place, log in enumerate(logs):
        rank = rank_from_name(log.path)
        path = Path(out) / (f"rank{rank}.log" if rank is not None else f"log{place}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = anonymize_log(lines_of_file(log.path), names)
        with path.open("a") as file:  # stdout and stderr of one rank go to one file
            file.writelines(line + "\n" for line in lines)
        written.append(str(path))
    if not written:
        raise NoDumps(f"neither dump nor log in {', '.join(paths)}")
    return sorted(set(written))


def _write_dumps(sources: Sequence[Source], out: str, names: Names) -> list[str]:
    dumps = [(source, top) for source, top in _tops(sources) if top is not None]
    shift = BASE_NS - min((at for _, top in dumps for at in _times(top)), default=BASE_NS)
    written = []
    for place, (source, top) in enumerate(dumps):
        name = f"rank_{source.rank}" if source.rank is not None else f"dump_{place}"
        quorum = f"job_quorum_{source.quorum}/" if source.quorum is not None else ""
        path = Path(out) / (quorum + name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(_dump(top, names, shift), protocol=2))
        written.append(str(path))
    return written


def _tops(sources: Iterable[Source]) -> Iterator[tuple[Source, dict[str, object] | None]]:
    for source, data in read_many(list(sources)):
        yield source, None if isinstance(data, BadDump) else _top(data)


def _top(data: bytes) -> dict[str, object] | None:
    """The whole dump as plain values, or None when it is not one."""
    entries: list[object] = []
    try:
        is_pickle = data[:1] == b"\x80"
        top = read_plain(data, entries.append) if is_pickle else json.loads(data)
    except TornDump:
        top = {"version": "2.10"}
    except (BadDump, ValueError, RecursionError):
        return None
    if isinstance(top, list):
        top = {"entries": top}
    if not isinstance(top, dict) or not ({"entries", "pg_config", "version"} & set(top)):
        return None
    return {**top, "entries": entries or top.get("entries") or []}


def _times(top: Mapping[str, object]) -> Iterator[int]:
    for entry in _dicts(top.get("entries")):
        at = entry.get("time_created_ns")
        if isinstance(at, int) and at > 0:
            yield at


def _dicts(value: object) -> list[dict[str, object]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _dump(top: Mapping[str, object], names: Names, shift: int) -> dict[str, object]:
    """Known keys only: whatever else a writer put into the file may name anything."""
    kept = {key: top[key] for key in ("version", "comm_lib_version", "nccl_version") if key in top}
    kept["pg_config"] = _config(top.get("pg_config"), names)
    if "pg_status" in top:
        kept["pg_status"] = top["pg_status"]
    kept["entries"] = [_entry(one, names, shift) for one in _dicts(top.get("entries"))]
    return kept


def _config(config: object, names: Names) -> dict[str, object]:
    groups = config if isinstance(config, dict) else {}
    return {
        names.group(str(key)): {
            "name": names.group(str(one.get("name", ""))),
            "desc": names.group(str(one.get("desc", ""))),
            "ranks": one.get("ranks", "[]"),
        }
        for key, one in groups.items()
        if isinstance(one, dict)
    }


_KEPT = (
    *("record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "seq_id", "op_id", "is_p2p"),
    *("profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes"),
    *("state", "retired", "timeout_ms", "duration_ms"),
)
_SHIFTED = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")


def _entry(entry: Mapping[str, object], names: Names, shift: int) -> dict[str, object]:
    kept = {key: entry[key] for key in _KEPT if key in entry}
    for key in _SHIFTED:
        if key in entry:
            at = entry[key]
            kept[key] = at + shift if isinstance(at, int) and at > 0 else at
    group = entry.get("process_group")
    if isinstance(group, list | tuple):
        kept["process_group"] = tuple(names.group(str(part)) for part in group)
    if "thread_name" in entry:
        kept["thread_name"] = names.thread(str(entry["thread_name"]))
    if isinstance(entry.get("frames"), list):
        kept["frames"] = [_frame(frame, names) for frame in _dicts(entry["frames"])]
    return kept


def _frame(frame: Mapping[str, object], names: Names) -> dict[str, object]:
    path, name = str(frame.get("filename", "")), str(frame.get("name", ""))
    return {
        "name": names.function(name, path),
        "filename": names.file(path),
        "line": frame.get("line", 0),
    }


_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-f]{1,4}:){4,}[0-9a-f:]+\b")
_PLACE = re.compile(r"(?:(\bpeer )\S+?)?<\d+>|0x[0-9a-f]+")
_HOST = re.compile(r"^(\[[\d\- :.]+\] )?([\w.-]+)(:\d+:\d+ \[\d+\])")
_HOST_FIELD = re.compile(r"(\bhost\s*: |\bnode )(\S+)")
_FRAME = re.compile(r"(?P<name>\S+) from (?P<path>\S+):(?P<line>\d+)$")
_TRACE = re.compile(r'File "(?P<path>.+?)", line (?P<line>\d+), in (?P<name>\S+)')
_ERROR = re.compile(r"^((?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception)): .*$")
_DESC = re.compile(r"(PG (?:ID \d+ PG GUID )?[^\s(\]]+ ?\()([^)]*)(\))")


def anonymize_log(lines: Iterable[str], names: Names) -> Iterator[str]:
    """Yield only the lines that the reader understands, without names."""
    for line in lines:
        text = line.rstrip("\n")
        if understands(text):
            yield _line(text, names)


def _line(text: str, names: Names) -> str:
    text = _HOST.sub(lambda m: (m[1] or "") + names.alias("host", m[2]) + m[3], text)
    text = _HOST_FIELD.sub(lambda m: m[1] + names.alias("host", m[2]), text)
    text = _ADDRESS.sub(lambda m: names.alias("address", m[0]), text)
    text = _PLACE.sub(lambda m: f"{m[1]}<0>" if m[1] else "<0>", text)
    text = _DESC.sub(lambda m: m[1] + names.group(m[2]) + m[3], text)
    if not is_echo(text):
        text = _ERROR.sub(r"\1: (text removed)", text)
    text = _TRACE.sub(
        lambda m: (
            f'File "{names.file(m["path"])}", line {m["line"]}, in '
            + names.function(m["name"], m["path"])
        ),
        text,
    )
    return _FRAME.sub(
        lambda m: (
            f"{names.function(m['name'], m['path'])} from {names.file(m['path'])}:{m['line']}"
        ),
        text,
    )
