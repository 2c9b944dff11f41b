"""Say in plain values how one lighthouse process stands: its role, its jobs, torchft's groups."""

from __future__ import annotations

from typing import Any

from lighthouse.host import Host
from lighthouse.status import JsonDict

SHOWN_MAX = 50


def host_status(host: Host, *, with_history: bool = False) -> JsonDict:
    """All that one lighthouse process can say. A follower says who leads."""
    holder, lighthouse = host.holder, host.lighthouse
    answer: JsonDict = {
        "role": "leader" if lighthouse else "follower",
        "leader": holder.address if holder else "",
        "term": holder.term if holder else 0,
        "jobs": {},
        "torchft": torchft_status(host),
    }
    if lighthouse is not None:
        answer |= lighthouse.status()
        if with_history:
            jobs = lighthouse.jobs.items()
            answer["history"] = {name: job.history()[-SHOWN_MAX:] for name, job in jobs}
    return answer


def host_config(host: Host) -> JsonDict:
    """The settings it runs with. No secrets."""
    return {
        **{name: getattr(host.policy, name) for name in host.policy.__slots__},
        **{f"torchft_{n}": getattr(host.torchft.policy, n) for n in host.torchft.policy.__slots__},
        "lease": type(host.lease).__name__,
        "lease_ttl_s": host.lease.timing.ttl_s,
        "has_tokens": host.tokens is not None,
        "tokens_problem": host.tokens.problem if host.tokens else "",
    }


def torchft_status(host: Host) -> dict[str, Any]:
    core = host.torchft.core
    previous = core.previous if core else None
    members = previous.members if previous else ()
    return {
        "quorum_id": previous.quorum_id if previous else 0,
        "members": [
            {"replica_id": m.replica_id, "step": m.step, "address": m.address} for m in members
        ],
        "asking": sorted(core.asks) if core else [],
        "heard": len(core.expiries) if core else 0,
    }
