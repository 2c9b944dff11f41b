import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcore.wire import codec, generate
from ftcore.wire.errors import BadMessage
from ftcore.wire.frames import frame, take_frame
from ftcore.wire.messages import (
    Attached,
    Drain,
    Hello,
    LostMember,
    Member,
    NewQuorum,
    Notice,
    Prepare,
    Quorum,
    Refused,
    Report,
    Want,
)

numbers = st.integers(0, 2**63 - 1)
names = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=30)
members = st.builds(
    Member,
    replica_id=names,
    incarnation=st.integers(0, 2**64 - 1),
    store_address=st.text(max_size=20),
    heal_addresses=st.lists(st.text(max_size=20), max_size=3).map(tuple),
)


@st.composite
def quorums(draw):
    found = draw(st.lists(members, max_size=4, unique_by=lambda m: m.replica_id))
    found = tuple(sorted(found, key=lambda m: m.replica_id))
    healing = frozenset(m.replica_id for m in found if draw(st.booleans()))
    return Quorum(quorum_id=draw(numbers), from_step=draw(numbers), members=found, healing=healing)


reports = st.builds(
    Report,
    member=members,
    number=numbers,
    quorum_id=numbers,
    left_id=numbers,
    committed=numbers,
    is_valid=st.booleans(),
    lineage=numbers,
    promised=numbers,
    limit=st.integers(-1, 2**62),
    failed_id=numbers,
    want=st.sampled_from(Want),
    reason=st.text(max_size=50),
    group_s=st.floats(0, 1e9),
    heal_s=st.floats(0, 1e9),
    held_s=st.floats(0, 1e9),
    heal_bytes_done=numbers,
    heal_bytes_total=numbers,
)
hellos = st.builds(
    Hello,
    job=names,
    report=reports,
    settings=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4),
    standing=st.none() | quorums(),
)
orders = st.one_of(
    st.builds(NewQuorum, quorum=quorums()),
    st.builds(Prepare, change_id=numbers, is_broken=st.booleans(), must_abort=st.booleans()),
    st.builds(
        LostMember,
        quorum_id=numbers,
        replica_id=names,
        incarnation=numbers,
        reason=st.text(),
        others=st.lists(st.tuples(names, numbers), max_size=3).map(tuple),
    ),
    st.builds(Drain, reason=st.text(max_size=20)),
    st.builds(Refused, what=st.text(), remedy=st.text(), compare_with=st.text()),
    st.builds(Notice, text=st.text()),
    st.builds(Attached, report_every_s=st.floats(0, 100)),
)


@given(orders)
def test_an_order_arrives_as_it_was_sent(order):
    got = codec.decode_order(codec.encode_order(order))
    if isinstance(order, NewQuorum):
        order = NewQuorum(quorum=codec.for_members(order.quorum))
    assert got == order


@given(quorums())
def test_a_quorum_is_stored_with_everything_in_it(quorum):
    assert codec.quorum_from_pb(codec.quorum_to_pb(quorum)) == quorum


@given(quorums(), st.sampled_from([0, 256]))
def test_a_member_learns_who_is_in_and_where_the_first_source_is(quorum, limit):
    with mock.patch.object(codec, "LOOKED_AT_MAX", limit):
        slim = codec.for_members(quorum)
    assert (slim.lives, slim.healing) == (quorum.lives, quorum.healing)
    assert [m.store_address for m in slim.sources[:1]] == [
        m.store_address for m in quorum.sources[:1]
    ]
    assert limit or not any(m.heal_addresses for m in slim.members)


@given(hellos)
def test_a_hello_arrives_as_it_was_sent(hello):
    got = codec.decode_from_group(codec.encode_hello(hello), member=None)
    standing = hello.standing and codec.for_members(hello.standing)
    assert got == replace(hello, standing=standing)


@given(reports)
def test_a_report_arrives_as_it_was_sent(report):
    assert codec.decode_from_group(codec.encode_report(report), member=report.member) == report


@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused_and_nothing_else(data):
    for decode in (
        codec.decode_order,
        lambda data: codec.decode_from_group(data, member=None),
        lambda data: codec.decode_from_group(data, member=Member(replica_id="a", incarnation=1)),
    ):
        try:
            decode(data)
        except BadMessage as error:
            assert error.remedy


def test_a_report_before_the_hello_is_refused():
    report = Report(member=Member(replica_id="a", incarnation=1), number=1)
    with pytest.raises(BadMessage, match="out of order"):
        codec.decode_from_group(codec.encode_report(report), member=None)


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 7))
def test_frames_arrive_whole_however_the_stream_is_cut(payloads, cut):
    stream, buffer, found = b"".join(map(frame, payloads)), bytearray(), []
    for start in range(0, len(stream), cut):
        buffer += stream[start : start + cut]
        while (payload := take_frame(buffer)) is not None:
            found.append(payload)
    assert found == payloads


def test_a_frame_that_claims_too_much_is_refused():
    with pytest.raises(BadMessage, match="claims"):
        take_frame(bytearray(b"\xff\xff\xff\xff"))


def test_the_committed_code_is_what_the_pinned_generator_makes():
    with tempfile.TemporaryDirectory() as folder:
        generate.generate(Path(folder))
        for name in ("ftcore_pb2.py", "ftcore_pb2.pyi"):
            made, kept = Path(folder, name), Path(generate.HERE, name)
            assert made.read_text() == kept.read_text(), f"run python -m {generate.__name__}"
