"""Decide quorums as torchft's own lighthouse does, for torchft clients: every step asks anew.

Pure: a clock and messages in, quorums out. Two things differ from torchft on purpose. Ids carry the
lighthouse's term, so they never start again at 1; and who was silent for too long is forgotten.
Semantics: torchft 0.2.0 as seen from outside (its paper of behaviour is in the README).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from ftcore.wire.messages import quorum_id_of, term_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftMember:
    """What one replica group says about itself. `replica_id` is `name:uuid`."""

    replica_id: str
    address: str = ""
    store_address: str = ""
    step: int = 0
    world_size: int = 1
    shrink_only: bool = False
    commit_failures: int = 0
    data: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftQuorum:
    """Who takes the next step together, sorted by replica_id."""

    quorum_id: int
    members: tuple[TorchftMember, ...]

    @property
    def replica_ids(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchftPolicy:
    """torchft's options: how many groups at least, and how long to wait for whom."""

    replicas_min: int = 1
    join_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 5.0


class Missing(Enum):
    """What has to change before there can be a quorum."""

    TOO_FEW = "fewer participants than replicas_min"
    NO_MAJORITY = "participants are not a majority of the groups that send heartbeats"
    STRAGGLERS = "groups that send heartbeats have not asked yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """No quorum. Until the time `until`, only a message can change that."""

    missing: Missing
    participants: int
    healthy: int
    until: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A group that waits for the next quorum, since `at`."""

    member: TorchftMember
    at: float


def decide(
    asks: Mapping[str, Ask],
    expiries: Mapping[str, float],
    previous: frozenset[str],
    policy: TorchftPolicy,
    now: float,
) -> tuple[TorchftMember, ...] | NotYet:
    """The members of the next quorum. `expiries`: until when each group counts as healthy."""
    healthy = {r for r, until in expiries.items() if now < until}
    joined = sorted((a for r, a in asks.items() if r in healthy), key=lambda a: a.member.replica_id)
    if previous and any(a.member.shrink_only for a in joined):
        joined = [a for a in joined if a.member.replica_id in previous]
    members = tuple(a.member for a in joined)
    next_expiry = min((until for until in expiries.values() if until > now), default=inf)

    def wait(missing: Missing, deadline: float = inf) -> NotYet:
        until = min(deadline, next_expiry)
        return NotYet(missing=missing, participants=len(joined), healthy=len(healthy), until=until)

    if len(joined) < max(1, policy.replicas_min):
        return wait(Missing.TOO_FEW)
    if previous and previous <= {m.replica_id for m in members}:
        return members  # everyone is back: nobody is worth waiting for
    if 2 * len(joined) <= len(healthy):
        return wait(Missing.NO_MAJORITY)
    deadline = min(a.at for a in joined) + policy.join_timeout_s
    if len(joined) < len(healthy) and now < deadline:
        return wait(Missing.STRAGGLERS, deadline)
    return members


FORGET_EVERY_S = 1.0


class TorchftCore:
    """Remembers who asked and who is alive, in one term of one lighthouse."""

    def __init__(
        self,
        policy: TorchftPolicy,
        *,
        term: int,
        previous: TorchftQuorum | None = None,
        now: float = 0.0,
    ) -> None:
        self.policy, self.term, self.previous = policy, term, previous
        self.asks: dict[str, Ask] = {}
        # Nobody may go on alone because the others have not found the new leader yet.
        known = previous.replica_ids if previous else ()
        self.expiries = dict.fromkeys(known, now + policy.heartbeat_timeout_s)
        self.wake_at = min(self.expiries.values(), default=inf)
        self._join_deadline = inf
        self._previous_ids = frozenset(previous.replica_ids if previous else ())
        self._not_back = set(self._previous_ids)

    def heartbeat(self, replica_id: str, now: float) -> None:
        expiry = self.expiries[replica_id] = now + self.policy.heartbeat_timeout_s
        self.wake_at = min(self.wake_at, expiry)

    def ask(self, member: TorchftMember, now: float) -> None:
        """Take part in the next quorum. Asking again replaces what was said before."""
        self.heartbeat(member.replica_id, now)
        self.asks[member.replica_id] = Ask(member=member, at=now)
        self._join_deadline = min(self._join_deadline, now + self.policy.join_timeout_s)
        self._not_back.discard(member.replica_id)

    def withdraw(self, replica_id: str, *, at: float) -> None:
        """This group hung up before it got the answer to what it asked at `at`."""
        ask = self.asks.get(replica_id)
        if ask is not None and ask.at == at:
            del self.asks[replica_id]
            self._join_deadline = self._earliest_deadline()
            if replica_id in self._previous_ids:
                self._not_back.add(replica_id)

    def waits_for(self, now: float) -> NotYet | None:
        """What those who asked wait for; None when nobody does."""
        answer = decide(self.asks, self.expiries, self._previous_ids, self.policy, now)
        return answer if self.asks and isinstance(answer, NotYet) else None

    def poll(self, now: float) -> TorchftQuorum | None:
        """The next quorum if there is one. Call after every message and at `wake_at`."""
        if not self._may_change(now):
            return None
        self.expiries = {r: until for r, until in self.expiries.items() if now < until}
        match decide(self.asks, self.expiries, self._previous_ids, self.policy, now):
            case NotYet() as waiting:
                # when nobody waits, ids that went silent are forgotten many at a time
                pause_s = 0.0 if self.asks else FORGET_EVERY_S
                self.wake_at = max(waiting.until, now + pause_s)
                return None
            case members:
                return self._issue(members)

    def _may_change(self, now: float) -> bool:
        """Cheap, because it is asked after each of many messages: could `decide` say yes now?"""
        everyone_is_back = bool(self._previous_ids) and not self._not_back
        everyone_asked = len(self.asks) >= len(self.expiries)
        return everyone_is_back or everyone_asked or now >= min(self.wake_at, self._join_deadline)

    def _earliest_deadline(self) -> float:
        earliest = min((a.at for a in self.asks.values()), default=inf)
        return earliest + self.policy.join_timeout_s

    def _issue(self, members: tuple[TorchftMember, ...]) -> TorchftQuorum:
        quorum = TorchftQuorum(quorum_id=self._next_id(members), members=members)
        for member in members:
            del self.asks[member.replica_id]
        self.previous = quorum
        self._previous_ids = frozenset(quorum.replica_ids)
        self._not_back = set(self._previous_ids)
        self._join_deadline = self._earliest_deadline()
        self.wake_at = min(self.expiries.values(), default=inf)
        return quorum

    def _next_id(self, members: tuple[TorchftMember, ...]) -> int:
        """The same id only while the same groups go on committing: a new id rebuilds everything."""
        last = self.previous.quorum_id if self.previous else 0
        first = quorum_id_of(self.term, 1)
        same = self._previous_ids == {m.replica_id for m in members}
        committing = not any(m.commit_failures for m in members)
        if same and committing and term_of(last) == self.term:
            return last
        return max(last + 1, first)
