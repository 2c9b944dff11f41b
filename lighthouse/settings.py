"""Turn the options of `lighthouse serve` into values, and refuse what cannot work together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcore.base.errors import BadSetting
from ftcore.base.ladder import Ladder, climb
from lighthouse.front import FrontLimits
from lighthouse.lease import Lease, Timing, parse_lease
from lighthouse.quorum import Policy
from lighthouse.records import JournalRecords, MemoryRecords, Records
from lighthouse.security import TokenFile, require_safe_bind, tls_context
from lighthouse.serve import Place, split_bind
from lighthouse.torchft_quorum import TorchftPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to serve, where, and with which lease. Nothing is opened yet."""

    policy: Policy
    torchft: TorchftPolicy
    place: Place
    lease_text: str
    timing: Timing
    journal: Path | None

    @classmethod
    def of(
        cls, *, bind: str, http: str, options: Mapping[str, Any], env: Mapping[str, str]
    ) -> Settings:
        """Raises BadSetting with the names and values that do not fit."""
        ladder = _ladder(options, env)
        _check_numbers(options)
        if options["journal"] and options["lease"] != "memory":
            raise BadSetting(
                f"--journal and --lease {options['lease']}: the lease keeps the quorums itself",
                remedy="Leave --journal away, or use --lease memory.",
            )
        settings = cls(
            policy=_policy(options, ladder),
            torchft=TorchftPolicy(
                replicas_min=options["min_replicas"],
                join_timeout_s=options["torchft_join_timeout"],
                heartbeat_timeout_s=options["torchft_heartbeat_timeout"],
            ),
            place=_place(bind, http, options),
            lease_text=options["lease"],
            timing=Timing(ttl_s=ladder["lease_ttl_s"]),
            journal=options["journal"],
        )
        settings.lease()  # a wrong --lease is named now
        return settings

    def lease(self) -> Lease | None:
        """None: this lighthouse is alone."""
        lease = parse_lease(self.lease_text, timing=self.timing)
        return None if self.lease_text == "memory" else lease

    def records(self) -> Records | None:
        if self.lease_text != "memory":
            return None
        return JournalRecords(self.journal) if self.journal else MemoryRecords()


def _check_numbers(options: Mapping[str, Any]) -> None:
    positive = ("torchft_heartbeat_timeout", "min_replicas", "connections_max")
    for name in (*positive, "max_replicas"):
        if options[name] <= 0:
            raise BadSetting(f"--{name.replace('_', '-')} {options[name]} is not above zero")
    for name in ("spares", "torchft_join_timeout", "deaths_max", "deaths_window", "hold_max"):
        if options[name] < 0:
            raise BadSetting(f"--{name.replace('_', '-')} {options[name]} is below zero")
    if options["max_replicas"] < options["min_replicas"]:
        raise BadSetting(
            f"--max-replicas {options['max_replicas']} is below "
            f"--min-replicas {options['min_replicas']}"
        )


def _ladder(options: Mapping[str, Any], env: Mapping[str, str]) -> Ladder:
    """The times that are options, then those of the environment, then what follows from them."""
    given = {
        "detect_within_s": options["detect_within"],
        "heartbeat_timeout_s": options["heartbeat_timeout"],
        "join_timeout_s": options["join_timeout"],
        "promise_timeout_s": options["promise_timeout"],
        "lease_ttl_s": options["lease_ttl"],
    }
    return climb(given, env, as_source="option")


def _policy(options: Mapping[str, Any], ladder: Ladder) -> Policy:
    return Policy(
        replicas_min=options["min_replicas"],
        replicas_max=options["max_replicas"],
        spares_max=options["spares"],
        join_timeout_s=ladder["join_timeout_s"],
        heartbeat_timeout_s=ladder["heartbeat_timeout_s"],
        report_every_s=ladder["report_every_s"],
        reattach_timeout_s=ladder["reattach_timeout_s"],
        learn_timeout_s=0.0 if options["lease"] == "memory" else ladder["learn_timeout_s"],
        promise_timeout_s=ladder["promise_timeout_s"],
        deaths_max=options["deaths_max"],
        deaths_window_s=options["deaths_window"],
        hold_most_s=options["hold_max"],
    )


def _place(bind: str, http: str, options: Mapping[str, Any]) -> Place:
    cert, key = options["tls_cert"], options["tls_key"]
    if bool(cert) != bool(key) or (options["tls_client_ca"] and not cert):
        raise BadSetting(
            f"--tls-cert {cert}, --tls-key {key}, --tls-client-ca {options['tls_client_ca']}: "
            "a certificate needs its key, and client certificates need TLS"
        )
    for address in filter(None, (bind, http)):
        host, _ = split_bind(address)
        require_safe_bind(host, has_tls=bool(cert), insecure=options["insecure"])
    if options["advertise"]:
        split_bind(options["advertise"])
    tls = tls_context(cert=cert, key=key, client_ca=options["tls_client_ca"]) if cert else None
    return Place(
        bind=bind,
        http_bind=http,
        advertise=options["advertise"],
        tls=tls,
        tokens=TokenFile.open(options["tokens"]) if options["tokens"] else None,
        limits=FrontLimits(connections_max=options["connections_max"]),
    )
