"""A group in memory, for tests: its members are threads of one process, its failures are ordered.

network = FakeNetwork()
group = FakeGroup(network)
network.fail("allreduce", rank=1, after=3)   # rank 1's 4th all-reduce breaks the connection
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ftcore.process_group.base import Group, Quorum
from ftcore.process_group.fake_rules import RULES, Arguments, deliver, output_tensors


@dataclass(slots=True)
class _Meeting:
    """One collective: the arguments of those who came, and its end."""

    arguments: dict[int, Arguments] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def end(self, error: str = "") -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class _FakeWork:
    def __init__(self, meeting: _Meeting, tensors: list[torch.Tensor], timeout_s: float) -> None:
        self._meeting, self._tensors, self._timeout_s = meeting, tensors, timeout_s

    def wait(self) -> bool:
        if not self._meeting.ended.wait(self._timeout_s):
            raise RuntimeError(f"Timed out waiting {self._timeout_s:g} s for a peer")
        if self._meeting.error:
            raise RuntimeError(self._meeting.error)
        return True

    def is_completed(self) -> bool:
        return self._meeting.ended.is_set()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self._tensors)
        return future


class _Room:
    """Where the members of one quorum meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.present: set[int] = set()
        self.complete = threading.Event()
        self.lock = threading.Lock()
        self.broken = ""
        self.meetings: dict[object, _Meeting] = {}

    def enter(self, rank: int, timeout_s: float) -> None:
        with self.lock:
            self.present.add(rank)
            if len(self.present) == self.size:
                self.complete.set()
        if not self.complete.wait(timeout_s):
            missing = sorted(set(range(self.size)) - self.present)
            raise TimeoutError(f"ranks {missing} did not come")

    def attend(
        self, key: object, seat: int, seats: int, rule: Callable[..., None], arguments: Arguments
    ) -> _Meeting:
        """Take a seat; whoever comes last computes the result for all."""
        with self.lock:
            meeting = self.meetings.setdefault(key, _Meeting())
            meeting.arguments[seat] = arguments
            if self.broken:
                meeting.end(self.broken)
            elif len(meeting.arguments) == seats:
                del self.meetings[key]
                with torch.no_grad():
                    rule([meeting.arguments[s] for s in range(seats)])
                meeting.end()
        return meeting

    def break_up(self, why: str) -> None:
        with self.lock:
            self.broken = self.broken or why
            for meeting in self.meetings.values():
                meeting.end(self.broken)


class FakeNetwork:
    """What all FakeGroups of one test share."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int], _Room] = {}
        self._faults: dict[tuple[str, int], int] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def fail(self, operation: str, *, rank: int, after: int = 0) -> None:
        """Break the connection when `rank` issues `operation` again after `after` more times."""
        with self._lock:
            self._faults[operation, rank] = self._calls[operation, rank] + after

    def room(self, prefix: str, size: int) -> _Room:
        with self._lock:
            return self._rooms.setdefault((prefix, size), _Room(size))

    def is_faulty(self, operation: str, rank: int) -> bool:
        """Count a call and say whether it was ordered to fail. An order is carried out once."""
        with self._lock:
            count = self._calls[operation, rank]
            self._calls[operation, rank] += 1
            if self._faults.get((operation, rank)) != count:
                return False
            del self._faults[operation, rank]
            return True


class _FakeBackend:
    def __init__(self, network: FakeNetwork, room: _Room, rank: int, timeout_s: float) -> None:
        self._network, self._room, self._rank, self._timeout_s = network, room, rank, timeout_s
        self._sequence = 0
        self._messages: Counter[object] = Counter()

    def __getattr__(self, operation: str) -> Callable[..., _FakeWork]:
        if operation not in RULES:
            raise AttributeError(operation)
        return lambda *arguments: self._collective(operation, arguments)

    def _collective(self, operation: str, arguments: Arguments) -> _FakeWork:
        self._check_fault(operation)
        self._sequence += 1
        meeting = self._room.attend(
            self._sequence, self._rank, self._room.size, RULES[operation], arguments
        )
        return _FakeWork(meeting, output_tensors(arguments[0]), self._timeout_s)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _FakeWork:
        return self._message("send", 0, (self._rank, rank), tag, tensors)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _FakeWork:
        return self._message("recv", 1, (rank, self._rank), tag, tensors)

    def _message(
        self, operation: str, seat: int, way: tuple[int, int], tag: int, tensors: list[torch.Tensor]
    ) -> _FakeWork:
        self._check_fault(operation)
        self._messages[way, tag] += 1
        key = (way, tag, self._messages[way, tag])
        meeting = self._room.attend(key, seat, 2, deliver, (tensors,))
        return _FakeWork(meeting, tensors, self._timeout_s)

    def _check_fault(self, operation: str) -> None:
        if self._network.is_faulty(operation, self._rank):
            self._room.break_up(f"Connection closed by rank {self._rank}, as ordered")


@dataclass(frozen=True, slots=True)
class _FakeLink:
    backend: object
    room: _Room
    rank: int

    def cut(self) -> None:
        self.room.break_up(f"Connection closed by rank {self.rank}")


class FakeGroup(Group):
    """Behaves like a real group, at once and without a network. CPU tensors only."""

    backend_name = "fake"

    def __init__(self, network: FakeNetwork, *, hold_errors: bool = False) -> None:
        super().__init__(hold_errors=hold_errors)
        self._network = network

    def _connect(self, quorum: Quorum) -> _FakeLink:
        room = self._network.room(quorum.prefix, quorum.world_size)
        room.enter(quorum.rank, quorum.timeout_s)
        backend = _FakeBackend(self._network, room, quorum.rank, quorum.timeout_s)
        return _FakeLink(backend, room, quorum.rank)
