"""A lease in a Kubernetes Lease object, with the records in its annotations.

Holder, term (leaseTransitions) and records live in one object, so one resourceVersion guards them
all: each change names the version it was made from, and the API server refuses it when anything
changed since. A ConfigMap would hold more (1 MiB instead of 256 KiB in all), but a second object
has a second version, and then a deposed leader could still write it until the new one has
touched it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from lighthouse.lease.api import Clock, Grant, Holder, Timing, monotonic_s, new_identity
from lighthouse.lease.errors import LeaseLost, LeaseUnreachable, RecordTooLarge
from lighthouse.lease.kubernetes_api import ApiServer, Conflict, Json, LeaseObject
from lighthouse.lease.observe import Sighting

ADDRESS = "ftcore.dev/address"
RECORD = "records.ftcore.dev/"
ANNOTATIONS_BYTES_MAX = 250_000  # the API server's limit is 262,144 for all of an object


class KubernetesLease:
    """One candidate of the Lease `namespace/name`. Needs get, watch, create and patch on it."""

    def __init__(
        self,
        namespace: str,
        name: str,
        *,
        timing: Timing,
        server: ApiServer | None = None,
        identity: str = "",
        clock: Clock = monotonic_s,
    ) -> None:
        self.timing = timing
        self.identity = identity or new_identity()
        self._clock = clock
        server = server or ApiServer.of_this_pod()
        self._object = LeaseObject(server, namespace, name, timeout_s=timing.ttl_s / 2)
        self._sighting = Sighting()
        self._newest: Json = {}
        self._one_at_a_time = asyncio.Lock()  # our own writes must not conflict with each other

    async def acquire(self, address: str, *, term_min: int = 1) -> Grant | Holder:
        found = await self._look()
        holder = self._living_holder(found)
        if holder is not None and holder.identity != self.identity:
            return holder
        asked_at = self._clock()
        term = max(_term(found) + 1, term_min)
        spec = self._spec(term) | {"acquireTime": _now()}
        try:
            await self._take(found, spec, {ADDRESS: address})
        except Conflict:
            return await self._who_was_faster()
        return Grant(
            term=term,
            valid_until=self.timing.tenure_end(asked_at),
            identity=self.identity,
            address=address,
        )

    async def renew(self, grant: Grant) -> Grant:
        asked_at = self._clock()
        await self._change(grant, self._spec(grant.term), {})
        return replace(grant, valid_until=self.timing.tenure_end(asked_at))

    async def release(self, grant: Grant) -> None:
        try:
            await self._change(grant, {"holderIdentity": ""}, {})
        except LeaseLost:
            pass

    async def watch(self) -> AsyncIterator[Holder | None]:
        shown, holder = False, None
        while True:
            try:
                found = await self._look()
                now = self._living_holder(found)
                if not shown or now != holder:
                    shown, holder = True, now
                    yield now
                version = found.get("metadata", {}).get("resourceVersion", "")
                await self._object.wait_event(version, timeout_s=self.timing.ttl_s / 2)
            except (LeaseUnreachable, OSError):
                await asyncio.sleep(self.timing.renew_every_s)

    async def write(self, grant: Grant, job: str, record: bytes | None) -> None:
        key = RECORD + hashlib.sha256(job.encode()).hexdigest()[:40]
        await self._change(grant, {}, {key: None if record is None else _pack(job, record)})

    async def read(self) -> dict[str, bytes]:
        annotations = _annotations(await self._look())
        return dict(_unpack(v) for k, v in annotations.items() if k.startswith(RECORD))

    async def close(self) -> None:
        await self._object.close()

    async def _change(self, grant: Grant, spec: Json, annotations: Json) -> None:
        """Change the object while this tenure holds it. Another writer costs a retry, no more."""
        async with self._one_at_a_time:
            found = self._newest
            while True:
                self._require(grant, found)
                self._require_room(found, annotations)
                try:
                    version = found["metadata"]["resourceVersion"]
                    self._newest = await self._object.patch(version, spec, annotations)
                    return
                except Conflict:
                    found = self._newest = await self._object.get() or {}

    async def _take(self, found: Json, spec: Json, annotations: Json) -> None:
        async with self._one_at_a_time:
            if not found:
                self._newest = await self._object.create(spec, annotations)
                return
            version = found["metadata"]["resourceVersion"]
            self._newest = await self._object.patch(version, spec, annotations)

    async def _who_was_faster(self) -> Holder:
        holder = self._living_holder(await self._look())
        if holder is None or holder.identity == self.identity:
            raise LeaseUnreachable("the lease changed hands while it was acquired")
        return holder

    async def _look(self) -> Json:
        found = await self._object.get() or {}
        spec = found.get("spec", {})
        beat = (spec.get("holderIdentity"), _term(found), spec.get("renewTime"))
        self._sighting = self._sighting.look(beat, self._clock())
        return found

    def _living_holder(self, found: Json) -> Holder | None:
        identity = found.get("spec", {}).get("holderIdentity") or ""
        if not identity or self._sighting.is_over(self.timing, self._clock()):
            return None
        address = str(_annotations(found).get(ADDRESS, ""))
        return Holder(term=_term(found), identity=str(identity), address=address)

    def _require(self, grant: Grant, found: Json) -> None:
        identity = found.get("spec", {}).get("holderIdentity")
        if (identity, _term(found)) != (self.identity, grant.term):
            raise LeaseLost(f"term {grant.term} has ended", term=grant.term, newest=_term(found))

    def _require_room(self, found: Json, added: Json) -> None:
        after = _annotations(found) | added
        size = sum(len(k) + len(v) for k, v in after.items() if v is not None)
        if size > ANNOTATIONS_BYTES_MAX:
            what = f"the records need {size} bytes, annotations hold {ANNOTATIONS_BYTES_MAX}"
            raise RecordTooLarge(what, bytes=size)

    def _spec(self, term: int) -> Json:
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self.timing.ttl_s),
            "leaseTransitions": term,
            "renewTime": _now(),
        }


def _term(found: Json) -> int:
    return int(found.get("spec", {}).get("leaseTransitions") or 0)


def _annotations(found: Json) -> dict[str, Any]:
    return found.get("metadata", {}).get("annotations") or {}


def _now() -> str:
    """For people's eyes only: nothing is decided by it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _pack(job: str, record: bytes) -> str:
    content = base64.b64encode(zlib.compress(record)).decode()
    return json.dumps({"job": job, "zlib": content})


def _unpack(value: str) -> tuple[str, bytes]:
    content = json.loads(value)
    return content["job"], zlib.decompress(base64.b64decode(content["zlib"]))
