"""Say in plain values how a job stands, for /status, the command line and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ftcore.wire.messages import show_id
from lighthouse.core import JobCore
from lighthouse.quorum import Decision, Hold, Seat, Waiting

JsonDict = dict[str, object]

NAMES_MAX = 8  # in one sentence


def job_status(core: JobCore, decision: Decision | None, now: float) -> JsonDict:
    """One job as JSON: its quorum, its groups, and what it waits for."""
    standing = core.standing
    return {
        "job": core.job,
        "quorum_id": standing.quorum_id if standing else 0,
        "quorum": show_id(standing.quorum_id) if standing else "none",
        "from_step": standing.from_step if standing else 0,
        "members": list(standing.replica_ids) if standing else [],
        "healing": sorted(standing.healing) if standing else [],
        "waiting": waiting_sentence(core, decision, now),
        "groups": {name: _group(core, seat, now) for name, seat in sorted(core.seats.items())},
    }


def _group(core: JobCore, seat: Seat, now: float) -> JsonDict:
    report = seat.report
    return {
        "state": group_state(core, seat),
        "incarnation": report.member.incarnation,
        "committed": report.committed,
        "quorum_id": report.quorum_id,
        "quorum": show_id(report.quorum_id) if report.quorum_id else "none",
        "heard_s_ago": round(now - seat.heard_at, 3),
        "is_connected": seat.closed_at == inf,
        "store_address": report.member.store_address,
        "reason": report.reason,
        "heal": _heal(core, seat),
        "slowness": round(report.slowness, 2),
    }


def _heal(core: JobCore, seat: Seat) -> JsonDict | None:
    """From whom a healing group copies its state, and how much of it has come."""
    if group_state(core, seat) != "healing":
        return None
    report, standing = seat.report, core.standing
    assert standing is not None
    done, total = report.heal_bytes_done, report.heal_bytes_total
    sources = [m.replica_id for m in standing.sources]
    share = f": {done / total:.0%} of {total / 1e9:.1f} GB" if total else ""
    return {
        "sources": sources,
        "bytes_done": done,
        "bytes_total": total,
        "says": f"heals to step {standing.from_step} from {_some(sources)}{share}",
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_MAX]) + (" and more" if len(names) > NAMES_MAX else "")


def group_state(core: JobCore, seat: Seat) -> str:
    """member, healing, waiting, leaving, failed or joining."""
    report, standing = seat.report, core.standing
    is_member = standing is not None and report.member.life in standing.lives
    if report.want.name == "LEAVE":
        return "leaving"
    if report.failed_id and is_member:
        return "failed"
    if is_member and (not report.is_valid or report.heal_bytes_total):
        return "healing"
    if is_member:
        return "member"
    return "waiting" if report.want.name == "SEAT" else "joining"


def waiting_sentence(core: JobCore, decision: Decision | None, now: float) -> str:
    """What a waiting job waits for and until when; empty while the quorum stands."""
    if not isinstance(decision, Waiting) or decision.hold is Hold.STANDING:
        return ""
    names = _some(decision.whom)
    until = "" if decision.until == inf else f", for {max(0.0, decision.until - now):.1f} s at most"
    count, least = len(decision.whom), core.policy.replicas_min
    match decision.hold:
        case Hold.TOO_FEW:
            here = f"only {count} asked ({names})" if count else "none asked yet"
            return f"waiting for {least} replica groups: {here}{until}"
        case Hold.NO_MAJORITY:
            return f"waiting for a majority: {count} of {len(core.seats)} living groups asked"
        case Hold.STRAGGLERS:
            return f"waiting for {names}, alive but not at a step boundary{until}"
        case Hold.PROMISES:
            return f"waiting for {names} to end the running step{until}"
        case Hold.ORPHANS:
            return (
                f"waiting for {names}: no member of the last quorum is here and they may still be "
                f"training; restart them under the same replica_id, or `lighthouse evict` them"
            )
        case Hold.NO_STATE:
            return f"no group has a whole state ({names}): restart the job from a checkpoint"
        case Hold.STATE_AWAY:
            return (
                f"waiting for {names}: nobody here has the newest state and they may; restart them "
                f"under the same replica_id, or `lighthouse evict` them to go on without it"
            )
        case Hold.LEARNING:
            return f"just started: waiting for groups of an earlier lighthouse{until}"
        case _:
            return decision.hold.value
