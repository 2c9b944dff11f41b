"""Keep quorums beside the lease: only the lighthouse that holds it can write them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ftcore.base.log import event
from ftcore.wire.codec import quorum_from_pb, quorum_to_pb
from ftcore.wire.ftcore_pb2 import Quorum as QuorumPb
from ftcore.wire.messages import Quorum
from lighthouse.core import Record
from lighthouse.election import Tenure
from lighthouse.errors import Deposed
from lighthouse.lease import LeaseLost, LeaseUnreachable
from lighthouse.status import JsonDict

log = logging.getLogger("lighthouse")
PREFIX = "quorum/"
RETRY_S = 0.05


class LeaseRecords:
    """The records of one tenure. `is_complete`: quorums are durable before they are announced."""

    is_complete = True

    def __init__(self, tenure: Tenure) -> None:
        self._tenure = tenure
        self.term = tenure.term

    def may_speak(self) -> bool:
        return self._tenure.is_valid()

    def newest(self) -> Mapping[str, Quorum]:
        return {
            key.removeprefix(PREFIX): quorum_from_pb(QuorumPb.FromString(record))
            for key, record in self._tenure.records.items()
            if key.startswith(PREFIX)
        }

    async def write(self, record: Record) -> None:
        """Tries for as long as this lighthouse leads: a lease store may be away for a moment."""
        data = quorum_to_pb(record.quorum).SerializeToString()
        while self._tenure.is_valid():
            try:
                await self._tenure.write(PREFIX + record.job, data)
                return
            except LeaseLost:
                break
            except LeaseUnreachable as error:
                event(log, "record.delayed", level=logging.WARNING, why=str(error))
                await asyncio.sleep(RETRY_S)
        raise Deposed(f"term {self.term} has ended", term=self.term)

    def note(self, job: str, interruption: JsonDict) -> None:
        """Not kept: a lease holds a few kilobytes."""

    def noted(self, job: str) -> list[JsonDict]:
        return []
