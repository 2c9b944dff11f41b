"""A lease in etcd: the cluster agrees on the holder, ends the lease, and fences every write.

Keys under the prefix: `leader` (tied to an etcd lease, so it vanishes with its holder), `term`
(the highest term there ever was) and `jobs/JOB` (one durable record a job). Each write is one
transaction that compares the revision of `leader`, which changes with every acquisition, and the
revision of the record, so that neither a deposed leader's write nor a delayed copy of an older
write can ever take effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message

from lighthouse.lease import etcd_pb2 as pb
from lighthouse.lease.api import (
    RECORD_BYTES_MAX,
    Clock,
    Grant,
    Holder,
    Timing,
    monotonic_s,
    new_identity,
)
from lighthouse.lease.errors import LeaseLost, LeaseUnreachable, RecordTooLarge
from lighthouse.lease.etcd_rpc import EtcdRpc, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The two keys of the election as one read found them; revision 0 means absent."""

    holder: Holder | None
    leader_revision: int
    leader_lease: int
    term: int
    term_revision: int
    store_revision: int


class EtcdLease:
    """One candidate of the lease kept under `prefix` of an etcd cluster (3.4 or later)."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = "/ftcore/lighthouse/",
        timing: Timing,
        identity: str = "",
        clock: Clock = monotonic_s,
    ) -> None:
        self.timing = timing
        self.identity = identity or new_identity()
        self._clock = clock
        self._leader, self._term = f"{prefix}leader".encode(), f"{prefix}term".encode()
        self._jobs = f"{prefix}jobs/".encode()
        self._rpc = EtcdRpc(endpoints, try_timeout_s=timing.try_timeout_s, clock=clock)
        self._revisions: dict[str, int] = {}

    async def acquire(self, address: str, *, term_min: int = 1) -> Grant | Holder:
        seen = await self._look()
        if seen.holder is not None and seen.holder.identity != self.identity:
            return seen.holder
        asked_at = self._clock()
        request = pb.LeaseGrantRequest(TTL=max(1, round(self.timing.ttl_s)))
        lease = await self._call("/etcdserverpb.Lease/LeaseGrant", request, pb.LeaseGrantResponse)
        term = max(seen.term + 1, term_min)
        content = {"identity": self.identity, "address": address, "term": term}
        answer = await self._txn(
            [(self._leader, seen.leader_revision), (self._term, seen.term_revision)],
            [
                _put(self._leader, json.dumps(content).encode(), lease.ID),
                _put(self._term, str(term).encode()),
            ],
        )
        if not answer.succeeded:
            return await self._who_was_faster(lease.ID)
        if seen.leader_lease:  # our own older tenure, whose reply we never got
            await self._revoke(seen.leader_lease)
        self._revisions.clear()
        return Grant(
            term=term,
            valid_until=self.timing.tenure_end(asked_at),
            identity=self.identity,
            address=address,
            fence=answer.header.revision,
            session=lease.ID,
        )

    async def renew(self, grant: Grant) -> Grant:
        asked_at = self._clock()
        timeout_s = max(0.0, grant.valid_until - asked_at)
        ttl_s = await self._rpc.keep_alive(grant.session, timeout_s=timeout_s)
        seen = await self._look()
        if ttl_s <= 0 or seen.leader_revision != grant.fence:
            raise LeaseLost(f"term {grant.term} has ended", term=grant.term, newest=seen.term)
        return replace(grant, valid_until=self.timing.tenure_end(asked_at))

    async def release(self, grant: Grant) -> None:
        await self._revoke(grant.session)

    async def watch(self) -> AsyncIterator[Holder | None]:
        shown, holder = False, None
        while True:
            try:
                seen = await self._look()
            except LeaseUnreachable:
                await asyncio.sleep(self.timing.renew_every_s)
                continue  # whoever leads has its own deadline
            if not shown or seen.holder != holder:
                shown, holder = True, seen.holder
                yield holder
            await self._rpc.wait_event(
                self._leader,
                start_revision=seen.store_revision + 1,
                timeout_s=self.timing.ttl_s,
            )

    async def write(self, grant: Grant, job: str, record: bytes | None) -> None:
        if record is not None and len(record) > RECORD_BYTES_MAX:
            raise RecordTooLarge(f"the record of job {job} has {len(record)} bytes", job=job)
        key = self._jobs + job.encode()
        change = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
        if record is not None:
            change = _put(key, record)
        while True:
            known = self._revisions.get(job, 0)
            answer = await self._txn(
                [(self._leader, grant.fence), (key, known)],
                [change],
                [_get(self._leader), _get(key)],
            )
            if answer.succeeded:
                self._revisions[job] = 0 if record is None else answer.header.revision
                return
            leader, current = (_only(r.response_range.kvs) for r in answer.responses)
            if leader.mod_revision != grant.fence:
                raise LeaseLost(f"term {grant.term} has ended", term=grant.term)
            self._revisions[job] = current.mod_revision  # written before we knew, or by a late copy

    async def read(self) -> dict[str, bytes]:
        end = self._jobs[:-1] + bytes([self._jobs[-1] + 1])
        answer = await self._range(self._jobs, end)
        skip = len(self._jobs)
        return {kv.key[skip:].decode(errors="replace"): kv.value for kv in answer.kvs}

    async def close(self) -> None:
        await self._rpc.close()

    async def _look(self) -> _Seen:
        answer = await self._txn([], [_get(self._leader), _get(self._term)])
        leader, term = (_only(r.response_range.kvs) for r in answer.responses)
        return _Seen(
            holder=_parse_holder(leader.value),
            leader_revision=leader.mod_revision,
            leader_lease=leader.lease,
            term=int(term.value or b"0"),
            term_revision=term.mod_revision,
            store_revision=answer.header.revision,
        )

    async def _who_was_faster(self, lease_id: int) -> Grant | Holder:
        await self._revoke(lease_id)
        seen = await self._look()
        if seen.holder is None or seen.holder.identity == self.identity:
            raise LeaseUnreachable("the lease changed hands while it was acquired")
        return seen.holder

    async def _revoke(self, lease_id: int) -> None:
        try:
            request = pb.LeaseRevokeRequest(ID=lease_id)
            await self._call("/etcdserverpb.Lease/LeaseRevoke", request, pb.LeaseRevokeResponse)
        except LeaseUnreachable:
            pass  # it ends by itself after its time to live

    async def _range(self, key: bytes, end: bytes) -> pb.RangeResponse:
        request = pb.RangeRequest(key=key, range_end=end)
        return await self._call("/etcdserverpb.KV/Range", request, pb.RangeResponse)

    async def _txn(
        self,
        compare: Sequence[tuple[bytes, int]],
        then: Sequence[pb.RequestOp],
        otherwise: Sequence[pb.RequestOp] = (),
    ) -> pb.TxnResponse:
        request = pb.TxnRequest(
            compare=[pb.Compare(target=2, key=k, mod_revision=r) for k, r in compare],
            success=then,
            failure=otherwise,
        )
        return await self._call("/etcdserverpb.KV/Txn", request, pb.TxnResponse)

    async def _call(self, path: str, request: Message, reply: type[Reply]) -> Reply:
        return await self._rpc.call(path, request, reply, timeout_s=self.timing.ttl_s)


def _put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def _get(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def _only(kvs: Sequence[pb.KeyValue]) -> pb.KeyValue:
    """The key that was asked for; an absent one has revision 0 and no value."""
    return kvs[0] if kvs else pb.KeyValue()


def _parse_holder(value: bytes) -> Holder | None:
    if not value:
        return None
    try:
        content = json.loads(value)
        return Holder(
            term=int(content["term"]),
            identity=str(content["identity"]),
            address=str(content["address"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        what = f"the leader key holds something else: {value[:40]!r}"
        raise LeaseUnreachable(what, remedy="Choose another key prefix.") from error
