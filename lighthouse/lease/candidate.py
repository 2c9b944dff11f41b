"""Decide what a candidate for leadership does next: a state machine without clock or network.

A candidate follows until the lease is granted, then leads until its tenure ends or it is told to
stop. Every function returns the next state; the shell (`lighthouse.election`) and the simulator do
what `next_move` says and report what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from lighthouse.lease.api import Grant, Holder, Timing


class Move(Enum):
    ACQUIRE = "try to get the lease"
    RENEW = "extend the tenure"
    STEP_DOWN = "stop leading"


class End(Enum):
    """Why a tenure ended."""

    EXPIRED = "the lease could not be renewed in time"
    LOST = "the lease store says that the tenure has ended"
    OUTRANKED = "managers have seen a higher term"
    RELEASED = "this lighthouse was told to stop"
    FAILED = "serving failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Nothing to do before `until`, unless something is reported."""

    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """All that one candidate knows. It leads exactly while `grant` is set and valid."""

    timing: Timing
    identity: str
    next_at: float = 0.0
    grant: Grant | None = None
    end: End | None = None
    holder: Holder | None = None
    term_min: int = 1

    def leads(self, now: float) -> bool:
        return self.grant is not None and self.end is None and self.grant.is_valid(now)


def next_move(candidate: Candidate, now: float) -> Move | Sleep:
    """What to do at `now`. The end of a tenure comes before everything else."""
    grant = candidate.grant
    if grant is None:
        return Move.ACQUIRE if now >= candidate.next_at else Sleep(until=candidate.next_at)
    if candidate.end is not None or not grant.is_valid(now):
        return Move.STEP_DOWN
    if now >= candidate.next_at:
        return Move.RENEW
    return Sleep(until=min(candidate.next_at, grant.valid_until))


def answered(candidate: Candidate, answer: Grant | Holder, now: float, jitter: float) -> Candidate:
    """The store answered an acquire. A grant that came too late to be used counts as none."""
    wait_s = candidate.timing.renew_every_s * (0.5 + jitter)
    if isinstance(answer, Holder):
        return replace(candidate, holder=answer, next_at=now + wait_s)
    if not answer.is_valid(now):
        return replace(candidate, next_at=now)
    own = Holder(term=answer.term, identity=answer.identity, address=answer.address)
    return replace(candidate, grant=answer, end=None, holder=own, next_at=_renewal(candidate, now))


def renewed(candidate: Candidate, grant: Grant, now: float) -> Candidate:
    return replace(candidate, grant=grant, next_at=_renewal(candidate, now))


def unanswered(candidate: Candidate, now: float, jitter: float) -> Candidate:
    """The store did not answer in time: try again soon. A tenure goes on until its own end."""
    wait_s = candidate.timing.renew_every_s * 0.2 * (0.5 + jitter)
    return replace(candidate, next_at=now + wait_s)


def lost(candidate: Candidate) -> Candidate:
    return replace(candidate, end=candidate.end or End.LOST)


def ended(candidate: Candidate, why: End) -> Candidate:
    """Somebody other than the store ended the tenure. Does nothing while following."""
    return candidate if candidate.grant is None else replace(candidate, end=candidate.end or why)


def outranked(candidate: Candidate, term: int) -> Candidate:
    """Managers have seen `term`, so a leader must have a higher one to be believed."""
    raised = replace(candidate, term_min=max(candidate.term_min, term + 1))
    if candidate.grant is not None and candidate.grant.term < term:
        return ended(raised, End.OUTRANKED)
    return raised


def sighted(candidate: Candidate, holder: Holder | None, now: float) -> Candidate:
    """The store showed who leads. A free lease is tried at once, a successor ends our tenure."""
    if candidate.grant is not None:
        newer = holder is not None and holder.term > candidate.grant.term
        return lost(candidate) if newer else candidate
    next_at = min(candidate.next_at, now) if holder is None else candidate.next_at
    return replace(candidate, holder=holder, next_at=next_at)


def stepped_down(candidate: Candidate, now: float, jitter: float) -> Candidate:
    """Serving has stopped. Follow again, a little later than the others."""
    wait_s = candidate.timing.renew_every_s * 0.2 * (0.5 + jitter)
    return replace(candidate, grant=None, end=None, holder=None, next_at=now + wait_s)


def _renewal(candidate: Candidate, now: float) -> float:
    return now + candidate.timing.renew_every_s
