"""Read the many entries of a dump that are alike at the speed of one regular expression each.

The general reader reads an entry opcode by opcode and so learns its shape: which keys, in which
order, under which memo numbers. From then on an entry of that shape is taken by one match, and its
parts (group, call, stack) are known by their bytes. Whatever does not match, or has parts not seen
before, goes to the general reader, which remains the only judge of what a pickle means.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from flightrec.reducer import Reducer

SHAPES_MAX = 8  # different shapes of entries that are remembered
ROWS_MAX = 4  # tensors of one side whose sizes are taken in a numbered pickle
KNOWN_MAX = 1 << 16  # different combinations of group, call and stack that are remembered

_GET = rb"h.|j.{4}"
_INT = rb"K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_COUNT = rb"(?:K.|M..|J...[\x00-\x7f])"
_NUMBER = rb"(?:" + _INT + rb"|N|\x88|\x89|G.{8})"
_INLINE = b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(192))


@dataclass(frozen=True, slots=True)
class _Grammar:
    """The expressions of values. torch's own pickles (protocol 2) hold neither memo marks behind
    containers nor strings inside entries, and their expressions compile far faster.

    What Python writes in protocols 2 and 3 has marks with numbers that grow from entry to entry,
    so there only what lies between them is captured (`pieces`), not whole values.
    """

    put: bytes
    word: bytes
    any_value: bytes
    values: Mapping[str, bytes]
    pieces: Mapping[str, bytes] | None = None

    def of(self, key: str, part: str) -> bytes:
        return _NUMBER if part == "number" else self.values.get(key, self.any_value)

    def captured(self, key: str) -> bytes:
        """A value that is known by the bytes that its captures take."""
        assert self.pieces is not None
        return self.pieces.get(key, b"(" + self.word + b"|" + _NUMBER + b")")


def _numbered_grammar() -> _Grammar:
    put, word = rb"(?:q.|r.{4})", rb"(?:" + _GET + rb")"

    def row(item: bytes) -> bytes:
        return rb"\]%s(?:\(((?:%s)*+)e|(%s)a)?" % (put, item, item)

    rows = b"".join(rb"(?:%s)?" % row(_INT) for _ in range(ROWS_MAX))
    sizes = rb"\]%s(?:\(%se|%sa)?" % (put, rows, row(_INT))
    pieces = {
        "frames": row(word),
        "process_group": rb"(%s)(%s)\x86%s" % (word, word, put),
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": row(word),
        "output_dtypes": row(word),
    }
    return _Grammar(put, word, b"", _grammar(2).values, pieces)


def _grammar(protocol: int) -> _Grammar:
    put = rb"\x94?" if protocol >= 4 else b""
    word = _GET + (rb"|\x8c(?:%s)%s" % (_INLINE, put) if protocol >= 4 else b"")
    scalar = word + b"|" + _INT + rb"|N|\x88|\x89|G.{8}"

    def list_of(item: bytes) -> bytes:
        return rb"(?:%s|\]%s(?:\((?:%s)*+e|(?:%s)a)?)" % (_GET, put, item, item)

    frame = rb"%s|\}%s\((?:%s)*+u" % (_GET, put, scalar)
    sizes = list_of(list_of(_INT))
    pair = rb"(?:(?:%s)(?:%s)\x86%s|%s)" % (word, word, put, list_of(word))
    values = {
        "frames": list_of(frame),
        "process_group": pair,
        "collective_seq_id": _COUNT,
        "p2p_seq_id": _COUNT,
        "time_created_ns": rb"\x8a\x08.{7}[\x00-\x3f]",
        "duration_ms": rb"G.{8}",
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": list_of(word),
        "output_dtypes": list_of(word),
    }
    return _Grammar(put, word, b"(?:" + scalar + b"|" + list_of(scalar) + b")", values)


_GRAMMARS = {protocol: _grammar(protocol) for protocol in (2, 4)}
_NUMBERED = _numbered_grammar()
# What the keys that are asked for are part of; see _part for the others.
_PART = {
    "frames": "known",
    "pg_id": "known",
    "process_group": "known",
    "profiling_name": "known",
    "input_sizes": "known",
    "output_sizes": "known",
    "input_dtypes": "known",
    "output_dtypes": "known",
    "timeout_ms": "known",
    "state": "known",
    "retired": "known",
    "is_p2p": "known",
    "collective_seq_id": "seq",
    "p2p_seq_id": "p2p",
    "time_created_ns": "created",
    "duration_ms": "duration",
}


def _part(key: str, value: object) -> str:
    """Numbers that nobody asks for are passed over; all else must be known by its bytes."""
    is_number = value is None or isinstance(value, int | float)
    return _PART.get(key, "number" if is_number else "known")


Known = tuple[int, int, int, int, int]  # group, call, site, flags, objects put into the memo


class _Shape:
    """One shape of entries: its expression, and which of its captures is what."""

    def __init__(
        self,
        keys: Sequence[str],
        numbers: Mapping[str, Sequence[int]],
        sample: Mapping[object, object],
        grammar: _Grammar,
    ) -> None:
        pattern, parts = rb"\}" + grammar.put + rb"\(", []
        for part, run in groupby(keys, key=lambda key: _part(key, sample[key])):
            run_keys = list(run)
            body = b"".join(_get(numbers[key]) + grammar.of(key, part) for key in run_keys)
            if part == "known" and grammar.pieces is not None:
                known = [_get(numbers[key]) + grammar.captured(key) for key in run_keys]
                pattern += b"".join(known)
                parts += [part] * sum(re.compile(one, re.DOTALL).groups for one in known)
            elif part == "known":
                pattern += b"(" + body + b")"
                parts.append(part)
            elif part == "number":
                pattern += body
            else:
                (key,) = run_keys
                pattern += _get(numbers[key]) + b"(" + grammar.of(key, part) + b")"
                parts.append(part)
        self.pattern = re.compile(pattern + b"u", re.DOTALL)
        self.known = itemgetter(*[i for i, part in enumerate(parts) if part == "known"])
        self.at = {part: parts.index(part) for part in parts if part != "known"}


def _get(numbers: Sequence[int]) -> bytes:
    """A key under any of the memo numbers that it has."""
    codes = [
        b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little")
        for number in numbers
    ]
    return b"(?:" + b"|".join(map(re.escape, codes)) + b")"


class FastLane:
    """Takes runs of entries out of `data` into a reducer's columns."""

    def __init__(self, data: bytes, reducer: Reducer) -> None:
        self._data, self._reducer = data, reducer
        self._grammar = _GRAMMARS[4 if data[1:2] >= b"\x04" else 2]
        self._shapes: dict[tuple[object, ...], _Shape] = {}
        self._known: dict[tuple[_Shape, object], Known] = {}
        self._last: _Shape | None = None
        self._learned = self._taken = 0

    def take(self, at: int) -> tuple[int, int, int]:
        """Take entries from `at` on; where the next byte is, how many were taken, and how many
        objects they put into the memo."""
        count = objects = 0
        shape = self._last
        while shape is not None:
            at, taken, put = self._run(shape, at)
            count, objects = count + taken, objects + put
            self._taken += taken
            others = (s for s in self._shapes.values() if s is not shape)
            shape = next((s for s in others if taken and s.pattern.match(self._data, at)), None)
            self._last = shape or self._last
        return at, count, objects

    def _run(self, shape: _Shape, at: int) -> tuple[int, int, int]:
        """Take entries of one shape as long as they come and all their parts are known."""
        match = shape.pattern.scanner(self._data, at).match  # type: ignore[attr-defined]
        known, parts = self._known, shape.known
        found: list[Known] = []
        rows: list[tuple[bytes, ...]] = []
        while (entry := match()) is not None:
            row = entry.groups()
            values = known.get((shape, parts(row)))
            if values is None:
                break
            found.append(values)
            rows.append(row)
            at = entry.end()
        if rows:
            self._append(shape, rows, found)
        return at, len(rows), sum(values[4] for values in found)

    def _append(
        self, shape: _Shape, rows: Sequence[tuple[bytes, ...]], found: Sequence[Known]
    ) -> None:
        reducer = self._reducer
        group, call, site, flags, _ = zip(*found, strict=True)
        reducer.group.extend(group)
        reducer.call.extend(call)
        reducer.site.extend(site)
        reducer.flags.extend(flags)
        seq, p2p, created = (shape.at[part] for part in ("seq", "p2p", "created"))
        reducer.seq.frombytes(b"".join([row[seq][1:].ljust(4, b"\0") for row in rows]))
        reducer.p2p_seq.frombytes(b"".join([row[p2p][1:].ljust(4, b"\0") for row in rows]))
        reducer.created_ns.frombytes(b"".join([row[created][2:] for row in rows]))
        if "duration" in shape.at:
            raw = b"".join([row[shape.at["duration"]][1:] for row in rows])
            values = array("d", raw)
            values.byteswap()  # pickles hold them big-endian
            reducer.duration_ms.extend(array("f", values))
        else:
            reducer.duration_ms.extend([-1.0] * len(rows))

    def learn(
        self, at: int, entry: Mapping[object, object], memo: Mapping[int, object], put: int
    ) -> None:
        """The general reader has just read the entry at `at` into the reducer's last row."""
        if self._reducer.bad:
            self._shapes.clear()  # something is odd here: leave it all to the general reader
            self._last = None
            return
        names = tuple(entry)
        shape = self._shapes.get(names)
        if shape is None:
            if self._data[at + 1 : at + 2] in (b"q", b"r"):
                self._grammar = _NUMBERED
            shape = self._new_shape(names, entry, memo)
        match = shape.pattern.match(self._data, at) if shape else None
        self._learned += 1
        if self._learned > 256 and self._learned > self._taken:
            self._last = None  # nothing repeats in these bytes: not worth trying
            return
        if shape is None or match is None or len(self._known) >= KNOWN_MAX:
            return
        r = self._reducer
        values = (r.group[-1], r.call[-1], r.site[-1], r.flags[-1], put)
        self._known[(shape, shape.known(match.groups()))] = values
        self._last = shape

    def _new_shape(
        self, names: tuple[object, ...], entry: Mapping[object, object], memo: Mapping[int, object]
    ) -> _Shape | None:
        if len(self._shapes) >= SHAPES_MAX or not set(names) >= _NEEDED:
            return None
        keys = [name for name in names if isinstance(name, str)]
        numbers: dict[str, list[int]] = {}
        for number, value in memo.items():
            if isinstance(value, str) and value in names:
                numbers.setdefault(value, []).append(number)
        if len(keys) < len(names) or not set(keys) <= set(numbers):
            return None
        shape = self._shapes[names] = _Shape(keys, numbers, entry, self._grammar)
        return shape


_NEEDED = {"record_id", "collective_seq_id", "p2p_seq_id", "time_created_ns", "profiling_name"}
