"""The pickle reader: reads what pickle reads, and nothing that does anything."""

import json
import os
import pickle
import random
import struct

import pytest

from flightrec.dump import read_dump
from flightrec.errors import BadDump
from flightrec.plainpickle import TornDump, read_plain
from flightrec.synth import Job, Layout, synthesize

PLAIN = {"a": [1, -1, 255, 256, 70000, -70000, 1 << 40, None, True, False, 1.5, "é" * 300, ()]}
DUMPS = synthesize(Job(layout=Layout(dp=2, pp=2), steps=8, is_batched_p2p=True), with_timing=True)


def read(data):
    return read_plain(data, lambda entry: None)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_plain_data_as_pickle_does(protocol):
    assert read(pickle.dumps(PLAIN, protocol)) == PLAIN


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /nonexistent/pwned",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [Bomb(), {"entries": [Bomb()]}, os.system, {1, 2}, b"x", Bomb])
def test_a_pickle_that_would_do_something_is_refused(value, protocol):
    with pytest.raises(BadDump, match="does not build plain data"):
        read(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo number that pickle would allocate 16 GiB for
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",  # a string of a terabyte
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02" + b"]q\x00" + b"h\x00a" * 3,
        b"\x80\x02e.",
        b"\x80\x02.",
        b"\x80",
        b"",
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_a_bomb_costs_nothing(data):
    try:
        read(data)
    except BadDump as error:
        assert error.remedy


def test_shared_lists_within_lists_cost_nothing():
    laughs = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    entry = {"record_id": 0, "input_sizes": laughs, "profiling_name": laughs, "frames": laughs}
    top = {"entries": [entry], "version": laughs, "pg_config": {"0": laughs}}
    dump = read_dump(pickle.dumps(top))
    assert len(dump.columns) == 0
    nested = ("ha",)
    for _ in range(60):
        nested = (nested, nested)
    with pytest.raises(BadDump):
        read(_keyed_by(nested))


def _keyed_by(value):
    """A pickle of {value: 1} without ever hashing it."""
    return pickle.dumps(value, 2)[:-1].replace(b"\x80\x02", b"\x80\x02}(", 1) + b"K\x01u."


def test_a_torn_dump_gives_the_entries_before_the_tear():
    whole = pickle.dumps(DUMPS[0])
    count = len(read_dump(whole).columns)
    torn = read_dump(whole[: len(whole) // 2])
    assert 0 < len(torn.columns) < count
    assert "ends early" in torn.problems[0]


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_fast_lane_reads_what_the_slow_one_reads(protocol):
    for dump in DUMPS.values():
        data = pickle.dumps(dump, protocol)
        fast = read_dump(data)
        slow = read_dump(json.dumps(dump).encode())
        for column in ("seq", "p2p_seq", "flags", "created_ns", "duration_ms"):
            assert getattr(fast.columns, column) == getattr(slow.columns, column)
        assert fast.calls == slow.calls and fast.columns.call == slow.columns.call


@pytest.mark.parametrize("seed", range(300))
def test_damaged_dumps_are_read_or_refused_never_worse(seed):
    rng = random.Random(seed)
    data = bytearray(pickle.dumps(DUMPS[seed % len(DUMPS)], rng.choice([2, 4])))
    for _ in range(rng.choice([1, 3, 30])):
        match rng.randrange(3):
            case 0:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case 1:
                del data[rng.randrange(len(data)) :]
            case _:
                at = rng.randrange(len(data) + 1)
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
        data = data or bytearray(b"\x80")
    try:
        dump = read_dump(bytes(data))
    except BadDump:
        return
    lengths = {len(getattr(dump.columns, c)) for c in ("group", "seq", "call", "site", "flags")}
    assert lengths == {len(dump.columns)}
    assert all(call < len(dump.calls) for call in dump.columns.call)


def test_a_torn_pickle_is_told_as_torn():
    with pytest.raises(TornDump):
        read(pickle.dumps(PLAIN)[:40])
