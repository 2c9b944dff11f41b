"""Digests: what decides, of all dumps of one host, in one small file, for a second level to merge.

A digest holds the columns that the verdict needs, each once however many ranks share it, and of
times only those of the last calls, which is all that tells stragglers. It is JSON, compressed: no
whole entries, nothing that could run. A verdict from digests is that from the dumps, byte for byte.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from flightrec.dump import Dump, LocalGroup
from flightrec.errors import BadDump
from flightrec.model import Call, Columns, Frame, Frontier, Site
from flightrec.sources import BYTES_MAX, Source
from flightrec.sparse import Sparse
from flightrec.stragglers import RECENT
from flightrec.worker import Result

MAGIC = b"flightrec digest 1\n"
SUFFIX = ".frdigest"  # how files in archives and object stores are told from dumps
_SHARED = ("group", "seq", "p2p_seq", "call", "site", "flags")  # what ranks may have in common
_COUNTERS = ("seq", "p2p_seq")  # these grow by one per call of a group: kept as differences


def pack(results: Sequence[Result]) -> bytes:
    """The digest of these dumps; broken ones are kept as what is wrong with them."""
    packer = _Packer()
    rows = [packer.row(source, dump) for source, dump in results]
    body = {"tables": {name: list(table) for name, table in packer.tables.items()}, "dumps": rows}
    return MAGIC + zlib.compress(json.dumps(body, separators=(",", ":")).encode(), 9)


def unpack(data: bytes, name: str) -> list[Result]:
    """The dumps of a digest, under the names of their own files. Raises BadDump."""
    try:
        raw = zlib.decompressobj().decompress(data[len(MAGIC) :], BYTES_MAX)
        body = json.loads(raw)
        unpacker = _Unpacker(body["tables"])
        return [unpacker.result(row) for row in body["dumps"]]
    except (zlib.error, binascii.Error, ValueError, TypeError, KeyError, IndexError) as error:
        raise BadDump(
            f"{name} is a torn or broken digest: {error!r:.100}",
            remedy="Make it again with `flightrec digest` on the host that has the dumps.",
        ) from error


class _Packer:
    """Writes dumps as rows of plain values; what repeats goes into tables."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, int]] = {"columns": {}, "calls": {}, "sites": {}}

    def row(self, source: Source, dump: Dump | BadDump) -> dict[str, object]:
        where = list(astuple(source))
        if isinstance(dump, BadDump):
            return {"source": where, "bad": str(dump), "remedy": dump.remedy}
        return {
            "source": where,
            "about": [dump.version, dump.library, dump.rank, dump.rank_hint, dump.first_record_id],
            "host": dump.host,
            "problems": list(dump.problems),
            "groups": [astuple(group) for group in dump.groups],
            "calls": [self._in("calls", astuple(call)) for call in dump.calls],
            "sites": [self._in("sites", [astuple(f) for f in site]) for site in dump.sites],
            "columns": [self._column(dump.columns, name) for name in _SHARED],
            "times": _times(dump),
        }

    def _in(self, table: str, value: object) -> int:
        text = json.dumps(value, separators=(",", ":"))
        return self.tables[table].setdefault(text, len(self.tables[table]))

    def _column(self, columns: Columns, name: str) -> int:
        column: array[int] = getattr(columns, name)
        if name in _COUNTERS:
            column = _differences(column, columns.group)
        text = _packed(column)
        return self.tables["columns"].setdefault(text, len(self.tables["columns"]))


def _packed(column: array[Any]) -> str:
    return column.typecode + base64.b85encode(zlib.compress(column.tobytes(), 9)).decode()


def _unpacked(text: str) -> array[Any]:
    column: array[Any] = array(text[0])
    inflate = zlib.decompressobj()
    column.frombytes(inflate.decompress(base64.b85decode(text[1:]), BYTES_MAX))
    return column


def _differences(column: array[int], group: array[int]) -> array[int]:
    """Each value less the one before it in its group, modulo the width of the column."""
    last: dict[int, int] = {}
    found = array(column.typecode, bytes(len(column) * column.itemsize))
    modulus = 1 << 8 * column.itemsize
    for at, (value, of) in enumerate(zip(column, group, strict=True)):
        found[at] = (value - last.get(of, 0)) % modulus
        last[of] = value
    return found


def _sums(column: array[int], group: array[int]) -> array[int]:
    """The inverse of `_differences`."""
    last: dict[int, int] = {}
    found = array(column.typecode, bytes(len(column) * column.itemsize))
    modulus = 1 << 8 * column.itemsize
    for at, (value, of) in enumerate(zip(column, group, strict=True)):
        found[at] = last[of] = (value + last.get(of, 0)) % modulus
    return found


def _times(dump: Dump) -> list[str]:
    """Places, times and durations of the last calls of each group."""
    columns = dump.columns
    places = array("I", sorted(_recent(dump)))
    times = array("q", [columns.created_ns[at] for at in places])
    durations = array("f", [columns.duration_ms[at] for at in places if columns.duration_ms])
    return [_packed(places), _packed(times), _packed(durations)]


def _recent(dump: Dump) -> Iterator[int]:
    """The last entry, and those of the last RECENT collectives of each group."""
    columns = dump.columns
    is_p2p = [call.is_p2p for call in dump.calls]
    seen: dict[int, set[int]] = {}
    for at in range(len(columns) - 1, -1, -1):
        if is_p2p[columns.call[at]] and at < len(columns) - 1:
            continue
        seqs = seen.setdefault(columns.group[at], set())
        if columns.seq[at] in seqs or len(seqs) < RECENT:
            seqs.add(columns.seq[at])
            yield at


class _Unpacker:
    """Makes dumps of rows. Equal columns, calls and sites become one object."""

    def __init__(self, tables: Mapping[str, Sequence[str]]) -> None:
        self._columns = [_unpacked(text) for text in tables["columns"]]
        self._calls = [Call(**_named(Call, json.loads(text))) for text in tables["calls"]]
        self._sites = [_site(json.loads(text)) for text in tables["sites"]]
        self._summed: dict[tuple[int, int], array[int]] = {}

    def result(self, row: Mapping[str, Any]) -> Result:
        source = Source(*row["source"])
        if "bad" in row:
            return source, BadDump(row["bad"], remedy=row["remedy"])
        version, library, rank, rank_hint, first_record_id = row["about"]
        dump = Dump(
            version=version,
            library=library,
            rank=rank,
            rank_hint=rank_hint,
            groups=tuple(_group(group) for group in row["groups"]),
            calls=tuple(self._calls[i] for i in row["calls"]),
            sites=tuple(self._sites[i] for i in row["sites"]),
            columns=self._columns_of(row),
            first_record_id=first_record_id,
            problems=tuple(row["problems"]),
            host=row["host"],
        )
        return source, dump

    def _columns_of(self, row: Mapping[str, Any]) -> Columns:
        number = dict(zip(_SHARED, row["columns"], strict=True))
        shared = {name: self._columns[number[name]] for name in _SHARED}
        for name in _COUNTERS:
            key = number[name], number["group"]
            if key not in self._summed:
                self._summed[key] = _sums(shared[name], shared["group"])
            shared[name] = self._summed[key]
        places, times, durations = map(_unpacked, row["times"])
        size = len(shared["seq"])
        if any(len(column) != size for column in shared.values()):
            raise ValueError("columns of unequal length")
        took: Any = Sparse(size, places, durations, -1.0) if durations else durations
        created: Any = Sparse(size, places, times, 0)
        return Columns(**shared, created_ns=created, duration_ms=took)


def _group(row: Sequence[Any]) -> LocalGroup:
    pg_id, name, desc, ranks, frontier, is_global = row
    return LocalGroup(
        pg_id=pg_id,
        name=name,
        desc=desc,
        ranks=None if ranks is None else tuple(ranks),
        frontier=None if frontier is None else Frontier(**_named(Frontier, frontier)),
        is_global=is_global,
    )


def _named(kind: Any, row: Sequence[Any]) -> dict[str, Any]:
    """The values of a row by the names of the fields of `kind`."""
    return dict(zip((f.name for f in fields(kind)), map(_tuples, row), strict=True))


def _site(rows: Sequence[Sequence[Any]]) -> Site:
    return tuple(Frame(name=name, filename=file, line=line) for name, file, line in rows)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
