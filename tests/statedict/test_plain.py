import json
import math
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcore.base.errors import FtError
from ftcore.statedict import CannotStore, PlainEncodingInvalid, decode, encode, register_type

GOLDEN = Path(__file__).parent / "plain_v1.json"
EVERYTHING = {
    "none": None,
    "flags": [True, False],
    "small": -7,
    "large": 1 << 4000,
    "floats": (0.1, -0.0, math.inf, -math.inf, 5e-324),
    "text": "naïve \U0001f642 \x00",
    "raw": b"\x00\xff",
    "mutable": bytearray(b"ab"),
    "complex": 1.5 - 2j,
    3: {(1, "two"): torch.Size([2, 3])},
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter({30: 1, 80: 2}),
    "sets": [{3, 1}, frozenset({"x"})],
    "array": np.arange(6, dtype="<i2").reshape(2, 3),
    "empty": np.zeros((0, 4), dtype=">f8"),
    "scalar": np.float32(1.25),
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(scalars, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(a, b):
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_every_kind_of_value_comes_back_with_its_type():
    assert same(decode(encode(EVERYTHING)), EVERYTHING)


def test_the_golden_file_is_read_and_written_unchanged():
    assert encode(EVERYTHING) == GOLDEN.read_bytes()
    assert same(decode(GOLDEN.read_bytes()), EVERYTHING)


def test_every_bit_of_a_nan_survives():
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    assert struct.pack(">d", decode(encode(nan))).hex() == "7ff8000000000123"


@given(values)
def test_what_is_encoded_is_decoded(value):
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("value", [object(), lambda: 1, range(3), np.array(["a"]), type])
def test_a_type_without_encoding_is_refused_with_its_path(value):
    with pytest.raises(CannotStore, match=r"loop\.2\.x"):
        encode({"loop": [1, 2, {"x": value}]})


def test_a_user_type_travels_once_it_is_registered():
    @dataclass
    class Position:
        epoch: int

    with pytest.raises(CannotStore, match="Position"):
        encode(Position(3))
    register_type(Position, tag="test.position", to_plain=lambda p: p.epoch, from_plain=Position)
    assert decode(encode([Position(3)])) == [Position(3)]


def test_one_tag_belongs_to_one_type():
    register_type(type("A", (), {}), tag="test.tag", to_plain=id, from_plain=id)
    with pytest.raises(CannotStore, match=r"test\.tag"):
        register_type(type("B", (), {}), tag="test.tag", to_plain=id, from_plain=id)


def test_a_newer_version_is_named():
    with pytest.raises(PlainEncodingInvalid, match="version 2"):
        decode(b'["ftplain",2,{"future":1}]'.replace(b'{"future":1}', b"1"))


def wrap(text):
    return b'["ftplain",1,' + text + b"]"


HOSTILE = {
    "nesting": wrap(b"[" * 100_000 + b"]" * 100_000),
    "objects": wrap(b'{"tuple":[' * 50_000 + b"]}" * 50_000),
    "huge shape": wrap(b'{"array":["<f8",[4611686018427387904],""]}'),
    "overflowing shape": wrap(b'{"array":["<f8",[4294967296,4294967296,0],""]}'),
    "object dtype": wrap(b'{"array":["|O",[1],"AAAAAAAAAAA="]}'),
    "digits": wrap(b"9" * 10_000),
    "unknown": wrap(b'{"pickle":"gASVDwAAAAAAAACMBXBvc2l4"}'),
    "unhashable": wrap(b'{"dict":[[[],1]]}'),
    "two keys": wrap(b'{"tuple":[],"set":[]}'),
    "nan": wrap(b"NaN"),
    "size": wrap(b'{"size":[-1]}'),
    "not a pair": wrap(b'{"dict":[[1]]}'),
    "unregistered": wrap(b'{"object":["os.system","true"]}'),
    "infinite": wrap(b"1e999"),
    "utf8": b"\xff\xfe",
    "nothing": b"",
    "no frame": b"{}",
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_bytes_are_refused(name):
    with pytest.raises(PlainEncodingInvalid):
        decode(HOSTILE[name])


def test_more_bytes_than_allowed_are_not_even_read():
    with pytest.raises(PlainEncodingInvalid, match="limit of 10"):
        decode(encode("x" * 100), bytes_max=10)


@settings(max_examples=400)
@given(st.data())
def test_damaged_bytes_give_a_value_or_a_clear_error(data):
    raw = bytearray(GOLDEN.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        decode(bytes(raw))
    except FtError as error:
        assert error.remedy


json_text = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tuple", "dict", "array", "size", "int", "float", "object", "set"])
            | st.text(max_size=3),
            inner,
            max_size=2,
        )
    ),
)


@settings(max_examples=400)
@given(json_text)
def test_any_json_gives_a_value_or_a_clear_error(value):
    try:
        decode(json.dumps(["ftplain", 1, value]).encode())
    except FtError as error:
        assert error.remedy
