"""Turn messages between managers and the lighthouse into bytes and back, checking what comes in."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ftcore.wire import ftcore_pb2 as pb
from ftcore.wire.errors import BadMessage
from ftcore.wire.messages import (
    Attached,
    Drain,
    Hello,
    LostMember,
    Member,
    NewQuorum,
    Notice,
    Order,
    Prepare,
    Quorum,
    Refused,
    Report,
    Want,
)

MESSAGE_BYTES_MAX = 4 << 20
LOOKED_AT_MAX = 256  # ranks
ID_CHARS_MAX = 256
TEXT_CHARS_MAX = 4096
ADDRESSES_MAX = 4096
SETTINGS_MAX = 64
NUMBER_MAX = 2**63 - 1
SECONDS_MAX = 1e9


def encode_hello(hello: Hello) -> bytes:
    message = pb.FromGroup(
        hello=pb.Hello(
            job=hello.job,
            member=member_to_pb(hello.report.member),
            report=_report_to_pb(hello.report),
            settings=dict(hello.settings),
            standing=quorum_to_pb(for_members(hello.standing)) if hello.standing else None,
        )
    )
    return message.SerializeToString()


def encode_report(report: Report) -> bytes:
    """Without the member: the stream's hello has named it."""
    return pb.FromGroup(report=_report_to_pb(report)).SerializeToString()


def decode_from_group(data: bytes, *, member: Member | None) -> Hello | Report:
    """Read what a manager sent; `member` is the one that this stream's hello named."""
    message = _parse(pb.FromGroup, data)
    kind = message.WhichOneof("kind")
    if kind == "hello" and member is None:
        return _hello_from_pb(message.hello)
    if kind == "report" and member is not None:
        return _report_from_pb(message.report, member)
    raise BadMessage(f"a manager sent {kind or 'an empty message'} out of order")


def encode_order(order: Order) -> bytes:
    match order:
        case NewQuorum(quorum=quorum):
            message = pb.ToGroup(new_quorum=quorum_to_pb(for_members(quorum)))
        case Prepare():
            message = pb.ToGroup(
                prepare=pb.Prepare(
                    change_id=order.change_id,
                    is_broken=order.is_broken,
                    must_abort=order.must_abort,
                )
            )
        case LostMember():
            message = pb.ToGroup(
                lost_member=pb.LostMember(
                    quorum_id=order.quorum_id,
                    replica_id=order.replica_id,
                    incarnation=order.incarnation,
                    reason=order.reason,
                    others=[pb.Member(replica_id=r, incarnation=i) for r, i in order.others],
                )
            )
        case Attached():
            message = pb.ToGroup(attached=pb.Attached(report_every_s=order.report_every_s))
        case Drain():
            message = pb.ToGroup(drain=pb.Drain(reason=order.reason))
        case Refused():
            message = pb.ToGroup(
                refused=pb.Refused(
                    what=order.what, remedy=order.remedy, compare_with=order.compare_with
                )
            )
        case Notice():
            message = pb.ToGroup(notice=pb.Notice(text=order.text))
    return message.SerializeToString()


def decode_order(data: bytes) -> Order:
    message = _parse(pb.ToGroup, data)
    match message.WhichOneof("kind"):
        case "new_quorum":
            return NewQuorum(quorum=quorum_from_pb(message.new_quorum))
        case "prepare":
            prepare = message.prepare
            return Prepare(
                change_id=_number(prepare.change_id),
                is_broken=prepare.is_broken,
                must_abort=prepare.must_abort,
            )
        case "lost_member":
            lost = message.lost_member
            return LostMember(
                quorum_id=_number(lost.quorum_id),
                replica_id=_name(lost.replica_id, "replica_id"),
                incarnation=lost.incarnation,
                reason=lost.reason[:TEXT_CHARS_MAX],
                others=tuple(
                    (_name(m.replica_id, "replica_id"), m.incarnation) for m in lost.others
                ),
            )
        case "attached":
            return Attached(report_every_s=message.attached.report_every_s)
        case "drain":
            return Drain(reason=message.drain.reason[:TEXT_CHARS_MAX])
        case "refused":
            refused = message.refused
            return Refused(
                what=refused.what, remedy=refused.remedy, compare_with=refused.compare_with
            )
        case "notice":
            return Notice(text=message.notice.text)
        case _:
            raise BadMessage("the lighthouse sent an order that this version does not know")


def member_to_pb(member: Member) -> pb.Member:
    return pb.Member(
        replica_id=member.replica_id,
        incarnation=member.incarnation,
        store_address=member.store_address,
        heal_addresses=member.heal_addresses,
    )


def member_from_pb(message: pb.Member) -> Member:
    if len(message.heal_addresses) > ADDRESSES_MAX:
        raise BadMessage(f"a group names {len(message.heal_addresses)} heal addresses")
    for address in (message.store_address, *message.heal_addresses):
        if len(address) > ID_CHARS_MAX:
            raise BadMessage(f"an address has {len(address)} characters")
    return Member(
        replica_id=_name(message.replica_id, "replica_id"),
        incarnation=message.incarnation,
        store_address=message.store_address,
        heal_addresses=tuple(message.heal_addresses),
    )


def for_members(quorum: Quorum) -> Quorum:
    """What a member needs of it: who is in, who heals, and where the first source's store is.

    With all addresses the list of 1,024 groups would have 185 kB, and each of them gets it. Up to
    LOOKED_AT_MAX ranks they stay in: a manager that notices a hang asks all ranks what they do.
    """
    if sum(len(m.heal_addresses) for m in quorum.members) <= LOOKED_AT_MAX:
        return quorum
    meets_at = quorum.sources[0] if quorum.sources else None
    members = tuple(_bare(m, is_source=m is meets_at) for m in quorum.members)
    return replace(quorum, members=members)


def _bare(member: Member, *, is_source: bool) -> Member:
    store_address = member.store_address if is_source else ""
    return Member(
        replica_id=member.replica_id,
        incarnation=member.incarnation,
        store_address=store_address,
    )


def quorum_to_pb(quorum: Quorum) -> pb.Quorum:
    names, healing = set(quorum.replica_ids), quorum.healing
    is_mostly_healing = names != healing and 2 * len(healing) > len(names)
    return pb.Quorum(
        quorum_id=quorum.quorum_id,
        from_step=quorum.from_step,
        members=[member_to_pb(m) for m in quorum.members],
        healing=() if is_mostly_healing else sorted(healing),
        sources=sorted(names - healing) if is_mostly_healing else (),
        spares=sorted(quorum.spares),
    )


def quorum_from_pb(message: pb.Quorum) -> Quorum:
    members = tuple(member_from_pb(m) for m in message.members)
    names = [m.replica_id for m in members]
    if names != sorted(set(names)):
        raise BadMessage("the members of a quorum are not sorted or not distinct")
    healing = set(names) - set(message.sources) if message.sources else set(message.healing)
    if not {*healing, *message.sources, *message.spares} <= set(names):
        raise BadMessage("a quorum heals or spares groups that are not its members")
    return Quorum(
        quorum_id=_number(message.quorum_id),
        from_step=_number(message.from_step),
        members=members,
        healing=frozenset(healing),
        spares=frozenset(message.spares),
    )


def _report_to_pb(report: Report) -> pb.Report:
    return pb.Report(
        number=report.number,
        quorum_id=report.quorum_id,
        left_id=report.left_id,
        committed=report.committed,
        is_torn=not report.is_valid,
        lineage=report.lineage,
        promised=report.promised,
        limit=report.limit,
        failed_id=report.failed_id,
        want=report.want.name,
        reason=report.reason[:TEXT_CHARS_MAX],
        group_s=report.group_s,
        heal_s=report.heal_s,
        held_s=report.held_s,
        heal_bytes_done=report.heal_bytes_done,
        heal_bytes_total=report.heal_bytes_total,
        slowness=report.slowness,
    )


def _report_from_pb(message: pb.Report, member: Member) -> Report:
    if message.want not in {want.value for want in Want}:
        raise BadMessage(f"a group wants {message.want}, which this version does not know")
    return Report(
        member=member,
        number=_number(message.number),
        quorum_id=_number(message.quorum_id),
        left_id=_number(message.left_id),
        committed=_number(message.committed),
        is_valid=not message.is_torn,
        lineage=_number(message.lineage),
        promised=_number(message.promised),
        limit=message.limit,
        failed_id=_number(message.failed_id),
        want=Want(message.want),
        reason=message.reason[:TEXT_CHARS_MAX],
        group_s=_seconds(message.group_s),
        heal_s=_seconds(message.heal_s),
        held_s=_seconds(message.held_s),
        heal_bytes_done=_number(message.heal_bytes_done),
        heal_bytes_total=_number(message.heal_bytes_total),
        slowness=_seconds(message.slowness),
    )


def _hello_from_pb(message: pb.Hello) -> Hello:
    if len(message.settings) > SETTINGS_MAX:
        raise BadMessage(f"a group sends {len(message.settings)} settings")
    member = member_from_pb(message.member)
    return Hello(
        job=_name(message.job, "job"),
        report=_report_from_pb(message.report, member),
        settings={k[:ID_CHARS_MAX]: v[:TEXT_CHARS_MAX] for k, v in message.settings.items()},
        standing=quorum_from_pb(message.standing) if message.HasField("standing") else None,
    )


M = TypeVar("M", bound=Message)


def _parse(kind: type[M], data: bytes) -> M:
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"a message has {len(data)} bytes, the limit is {MESSAGE_BYTES_MAX}")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadMessage(f"{len(data)} bytes are no {kind.DESCRIPTOR.name}: {error}") from error


def _seconds(value: float) -> float:
    if not 0 <= value <= SECONDS_MAX:  # not a number, too
        raise BadMessage(f"{value} seconds are out of range")
    return value


def _name(text: str, what: str) -> str:
    if not text or len(text) > ID_CHARS_MAX or not text.isprintable():
        raise BadMessage(
            f"{what} {text[:40]!r} is empty, longer than {ID_CHARS_MAX} or not printable"
        )
    return text


def _number(value: int) -> int:
    if not 0 <= value <= NUMBER_MAX:
        raise BadMessage(f"{value} is out of range")
    return value
