"""New lives that said hello under a replica_id whose old life is not known to be dead."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeGuard

from ftcore.wire.messages import Hello, Report


@dataclass(slots=True)
class Rivals:
    """Whoever of the two is heard on is the living one."""

    _hellos: dict[str, Hello] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)

    def add(self, hello: Hello, now: float) -> None:
        replica_id = hello.report.member.replica_id
        self._hellos[replica_id] = hello
        self._since.setdefault(replica_id, now)

    def says(self, report: Report) -> bool:
        """Whether a rival says this. What it says last counts when it gets the seat."""
        hello = self._hellos.get(report.member.replica_id)
        if hello is None or hello.report.member.life != report.member.life:
            return False
        self._hellos[report.member.replica_id] = replace(hello, report=report)
        return True

    def get(self, replica_id: str) -> Hello | None:
        return self._hellos.get(replica_id)

    def is_outlasted(self, rival: Hello | None, patience_s: float, now: float) -> TypeGuard[Hello]:
        """Whether a report of the old life shows that it lives. One that comes right after the
        rival's hello may have been sent long before, by a group that is dead now: a lighthouse that
        was paused reads the streams in any order."""
        return rival is not None and now >= self._since[rival.report.member.replica_id] + patience_s

    def closed(self, life: tuple[str, int]) -> None:
        hello = self._hellos.get(life[0])
        if hello is not None and hello.report.member.life == life:
            self.pop(life[0])

    def pop(self, replica_id: str) -> Hello | None:
        self._since.pop(replica_id, None)
        return self._hellos.pop(replica_id, None)
