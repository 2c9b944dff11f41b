"""Read pickles of plain data without ever running one: a reader of its own for some 30 opcodes.

A pickle is a program. This reader knows only the instructions that build dicts, lists, tuples,
strings, numbers, booleans and None, which is all that a flight recorder writes; every instruction
that could name a class or call something does not exist here, so there is nothing to switch off.
Memory is bounded by the size of the input: no instruction allocates more than the bytes it spans.
Entries are handed over one by one as they are completed, so a dump of any size streams, and a
torn dump yields the entries before the tear.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Protocol

from flightrec.errors import BadDump

DEPTH_MAX = 64  # a genuine dump nests 6 deep
_FLOAT = struct.Struct(">d")
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}


class TornDump(BadDump):
    """The dump ends in the middle; what came before has been handed over."""

    remedy = "The rank died or was killed while it wrote; the entries before the tear are used."


class Lane(Protocol):
    """Takes entries that are like earlier ones by itself."""

    def take(self, at: int) -> tuple[int, int, int]: ...

    def learn(
        self, at: int, entry: Mapping[object, object], memo: Mapping[int, object], put: int
    ) -> None: ...


def read_plain(data: bytes, on_entry: Callable[[object], None], lane: Lane | None = None) -> object:
    """Return the value in `data`; each dict with a "record_id" goes to `on_entry` instead and
    leaves None in its place. Entries that `lane` takes do not even get there. Raises TornDump if
    `data` ends early, BadDump if it is anything else than a pickle of plain data."""
    stack: list[object] = []
    try:
        return _run(data, stack, on_entry, lane)
    except (IndexError, struct.error) as error:
        raise TornDump(f"the pickle ends early, after {len(data)} bytes", top=stack) from error
    except (TypeError, ValueError, AttributeError, KeyError, UnicodeDecodeError) as error:
        raise BadDump(f"not a pickle of plain data: {error}") from error


def _run(
    data: bytes, stack: list[object], on_entry: Callable[[object], None], lane: Lane | None
) -> object:
    """The interpreter loop: one long chain of cases, the frequent ones first, because every call
    and lookup in it counts (some 80 instructions an entry)."""
    memo: dict[int, object] = {}
    marks: list[int] = []
    push = stack.append
    at = put = 0  # objects put into the memo by number of arrival
    starts: dict[int, tuple[int, int]] = {}  # place on the stack -> where its dict starts
    while True:
        code = data[at]
        at += 1
        if code == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif code == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif code == 0x28:  # MARK
            if len(marks) >= DEPTH_MAX:
                raise ValueError(f"nested deeper than {DEPTH_MAX}")
            marks.append(len(stack))
        elif code == 0x5D:  # EMPTY_LIST
            push([])
        elif code == 0x65:  # APPENDS
            mark = marks.pop()
            _list(stack[mark - 1]).extend(stack[mark:])
            del stack[mark:]
        elif code == 0x94:  # MEMOIZE
            memo[put] = stack[-1]
            put += 1
        elif code == 0x4D:  # BININT2
            push(data[at] | data[at + 1] << 8)
            at += 2
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
            at += 4
        elif code == 0x6A:  # LONG_BINGET
            push(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif code == 0x75:  # SETITEMS
            items = _set_items(stack, marks.pop())
            if "record_id" in items:
                on_entry(items.copy())
                if lane is not None:
                    start, before = starts[len(stack) - 1]
                    lane.learn(start, items, memo, put - before)
                items.clear()
                stack[-1] = None
        elif code == 0x7D:  # EMPTY_DICT
            if lane is not None:
                at, count, objects = lane.take(at - 1)
                put += objects
                stack.extend([None] * count)
                if count:
                    continue
                at += 1
                starts[len(stack)] = (at - 1, put)
            push({})
        elif code == 0x2E:  # STOP
            return stack[-1]
        else:
            at = _rare(code, data, at, stack, marks)


def _set_items(stack: list[object], mark: int) -> dict[object, object]:
    """Put the values above the mark into the dict below it."""
    items = _dict(stack[mark - 1])
    values = iter(stack[mark:])
    for key, value in zip(values, values, strict=True):
        items[_key(key)] = value
    del stack[mark:]
    return items


def _rare(code: int, data: bytes, at: int, stack: list[object], marks: list[int]) -> int:
    """The instructions that come once or a few times an entry. Returns where the next one is."""
    if code in _SIZED:
        width, build = _SIZED[code]
        start = at + width
        end = start + int.from_bytes(_take(data, at, start), "little")
        stack.append(build(_take(data, start, end)))
        return end
    if code in _CONSTANTS:
        stack.append(_CONSTANTS[code])
        return at
    if code in _TUPLES:
        size = _TUPLES[code]
        stack[-size:] = [_tuple(stack[-size:])]
        return at
    if code == 0x4A:  # BININT
        stack.append(int.from_bytes(_take(data, at, at + 4), "little", signed=True))
        return at + 4
    if code == 0x47:  # BINFLOAT
        stack.append(_FLOAT.unpack(data[at : at + 8])[0])
        return at + 8
    if code == 0x80:  # PROTO
        return at + 1
    if code == 0x95:  # FRAME
        return at + 8
    if code == 0x29:  # EMPTY_TUPLE
        stack.append(())
    elif code == 0x74:  # TUPLE
        mark = marks.pop()
        stack[mark:] = [_tuple(stack[mark:])]
    elif code == 0x61:  # APPEND
        value = stack.pop()
        _list(stack[-1]).append(value)
    elif code == 0x73:  # SETITEM
        value, key = stack.pop(), stack.pop()
        _dict(stack[-1])[_key(key)] = value
    else:
        raise ValueError(f"instruction 0x{code:02x} at byte {at - 1} does not build plain data")
    return at


def _take(data: bytes, start: int, end: int) -> bytes:
    if end > len(data):
        raise IndexError
    return data[start:end]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _number(raw: bytes) -> int:
    if len(raw) > 16:
        raise ValueError(f"a number of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


# opcode: width of the length, and what the bytes become
_SIZED: dict[int, tuple[int, Callable[[bytes], object]]] = {
    0x58: (4, _text),  # BINUNICODE
    0x8C: (1, _text),  # SHORT_BINUNICODE
    0x8D: (8, _text),  # BINUNICODE8
    0x8A: (1, _number),  # LONG1
    0x8B: (4, _number),  # LONG4
}


def _tuple(values: list[object]) -> object:
    """A tuple holds scalars only, otherwise it becomes a list: hashing tuples of shared tuples
    can take for ever."""
    return values if any(isinstance(v, list | tuple | dict) for v in values) else tuple(values)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"appends to a {type(value).__name__}")
    return value


def _dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise TypeError(f"sets items of a {type(value).__name__}")
    return value


def _key(value: object) -> str | int:
    if not isinstance(value, str | int):
        raise TypeError(f"a {type(value).__name__} as a key")
    return value
