import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftcore.base.errors import FtError
from ftcore.statedict import Box, Entry, Layout, PlainEncodingInvalid, first_difference, layout
from tests.statedict.models import make, train


def entry(name, shape=(2, 3), **changes):
    shape = tuple(shape)
    facts = {
        "dtype": "float32",
        "itemsize": 4,
        "global_shape": shape,
        "box": Box(offset=(0,) * len(shape), shape=shape),
    }
    return Entry(name=name, **(facts | changes))


A = Layout((entry("w"), entry("b", [3])))


def test_the_hash_is_the_same_on_every_machine_and_version():
    assert f"{A.hash:016x}" == "81eae52741ce8ff2"


def test_equal_layouts_have_no_difference():
    assert first_difference(A, Layout(A.entries)) is None


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            [entry("w", [2, 4]), entry("b", [3])],
            "w is float32[2, 3] in this group and float32[2, 4] in the other",
        ),
        ([entry("w")], "this group has b (float32[3]), which the other has not"),
        (
            [entry("w"), entry("x"), entry("b", [3])],
            "the other has x (float32[2, 3]), which this group has not",
        ),
        (
            [entry("b", [3]), entry("w")],
            "this group has w where the other has b: the order differs",
        ),
        (
            [entry("w", dtype="bfloat16", itemsize=2), entry("b", [3])],
            "w is float32[2, 3] in this group and bfloat16[2, 3] in the other",
        ),
        (
            [entry("w"), entry("b", [3], lazy=True)],
            "b is lazy=False in this group and lazy=True in the other",
        ),
        (
            [entry("w"), entry("b", [3], alias_of="w")],
            "b is float32[3] in this group and float32[3] tied to w in the other",
        ),
    ],
)
def test_the_first_difference_is_a_sentence_that_names_it(other, sentence):
    b = Layout(tuple(other))
    assert first_difference(A, b) == sentence
    assert A.hash != b.hash


def test_a_layout_travels_as_bytes():
    model, optimizer = make()
    train(model, optimizer)
    whole = layout({"model": model, "optim": optimizer})
    assert Layout.from_bytes(whole.to_bytes()) == whole


def test_a_trained_and_a_fresh_group_have_the_same_static_layout():
    trained, fresh = make(0), make(1)
    train(*trained)
    a, b = layout(list(trained)), layout(list(fresh))
    assert a.hash != b.hash
    assert a.static.hash == b.static.hash


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'["ftlayout",2,[]]', b'["ftlayout",1,[1]]', b'["ftlayout",1,[[1]]]']
    + [A.to_bytes().replace(b"[2,3]", bad) for bad in (b"[-2,3]", b'"23"', b"[2.0,3]", b"[2]")],
)
def test_bytes_that_are_no_layout_are_refused(data):
    with pytest.raises(PlainEncodingInvalid):
        Layout.from_bytes(data)


@given(st.integers(0, len(A.to_bytes()) - 1), st.binary(max_size=3))
def test_damaged_bytes_give_a_layout_or_a_clear_error(at, change):
    raw = bytearray(A.to_bytes())
    raw[at : at + len(change)] = change
    try:
        assert isinstance(Layout.from_bytes(bytes(raw)), Layout)
    except FtError as error:
        assert error.remedy


def test_bytes_count_tied_tensors_once():
    shared = torch.zeros(10)
    assert layout({"a": shared, "b": shared}).nbytes == 40
