"""Arbitrary and half-right bytes through the codec and the core: no crash, no wrong quorum."""

import hypothesis.strategies as st
from hypothesis import given, settings

from ftcore.wire.codec import decode_from_group, encode_hello, encode_report
from ftcore.wire.errors import BadMessage
from ftcore.wire.messages import Hello, Member, Quorum, Report, Want
from lighthouse import torchft_pb2
from lighthouse.core import JobCore
from lighthouse.quorum import Policy
from lighthouse.torchft_compat import member_of
from lighthouse.torchft_quorum import TorchftCore, TorchftPolicy

POLICY = Policy(replicas_min=2, join_timeout_s=3)
ids = st.integers(0, 2**63 - 1)
small = st.one_of(st.integers(0, 4), ids)
names = st.one_of(st.sampled_from(["a", "b", "c", "ü/\n\0<b>", "x" * 300]), st.text(max_size=20))
members = st.builds(Member, replica_id=names, incarnation=small, store_address=st.text(max_size=9))
reports = st.builds(
    Report,
    member=members,
    number=small,
    quorum_id=ids,
    left_id=small,
    committed=small,
    is_valid=st.booleans(),
    lineage=small,
    promised=small,
    limit=small,
    failed_id=small,
    want=st.sampled_from(Want),
    reason=st.text(max_size=20),
)
quorums = st.builds(
    Quorum,
    quorum_id=small,
    from_step=small,
    members=st.lists(members, max_size=4).map(tuple),
    healing=st.frozensets(names, max_size=2),
)
hellos = st.builds(
    Hello,
    job=names,
    report=reports,
    settings=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
    standing=st.one_of(st.none(), quorums),
)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(data):
    try:
        decode_from_group(data, member=Member(replica_id="a", incarnation=1))
    except BadMessage as error:
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(hellos, st.data())
def test_a_damaged_message_is_a_message_or_refused(hello, data):
    whole = encode_hello(hello)
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    damaged = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :]
    try:
        decode_from_group(damaged, member=None)
    except BadMessage as error:
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.one_of(hellos, reports), st.floats(0, 5)), max_size=25))
def test_whatever_groups_claim_ids_grow_and_no_id_has_two_member_sets(messages):
    core, now, issued = JobCore("job", POLICY, first_id=1, now=0.0), 0.0, {}
    newest = 0
    for message, wait_s in messages:
        now += wait_s
        try:
            is_hello = isinstance(message, Hello)
            data = encode_hello(message) if is_hello else encode_report(message)
            got = decode_from_group(data, member=None if is_hello else message.member)
        except BadMessage:
            continue
        turn = core.hello(got, now) if isinstance(got, Hello) else core.report(got, now)
        for record in turn.records:
            quorum = record.quorum
            assert quorum.quorum_id > newest
            assert issued.setdefault(quorum.quorum_id, quorum.lives) == quorum.lives
            assert len(quorum.members) >= POLICY.replicas_min or not quorum.members
            newest = quorum.quorum_id


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=60), st.floats(0, 5)), max_size=25))
def test_torchfts_messages_may_be_anything(messages):
    core, now, newest = TorchftCore(TorchftPolicy(replicas_min=2), term=1), 0.0, 0
    for data, wait_s in messages:
        now += wait_s
        try:
            request = torchft_pb2.LighthouseQuorumRequest.FromString(data)
        except Exception:  # protobuf's DecodeError
            continue
        core.ask(member_of(request.requester), now)
        quorum = core.poll(now)
        if quorum:
            assert quorum.quorum_id >= newest
            assert len(quorum.members) >= 2
            newest = quorum.quorum_id
