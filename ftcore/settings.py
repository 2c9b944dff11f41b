"""Where a replica group finds its lighthouse and who it is: arguments, then environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftcore.base.errors import BadSetting
from ftcore.base.ladder import RULES, Ladder


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """lighthouse: endpoints, `host:port` each. host: the address that others reach this rank at.
    rank, ranks: place in the replica group, as torchrun sets them."""

    lighthouse: tuple[str, ...]
    job: str
    replica_id: str
    rank: int
    ranks: int
    host: str


def find_place(
    env: Mapping[str, str],
    *,
    lighthouse: str | None,
    job: str | None,
    replica_id: str | None,
    host: str | None,
) -> Place:
    """Raises BadSetting, naming what is missing."""
    where = lighthouse or env.get("FTCORE_LIGHTHOUSE", "")
    if not where:
        raise BadSetting(
            "no lighthouse is named",
            remedy="Pass lighthouse='HOST:PORT' to ftcore.Manager or set FTCORE_LIGHTHOUSE.",
        )
    endpoints = tuple(_endpoint(text) for text in where.split(","))
    name = replica_id or env.get("FTCORE_REPLICA_ID", "")
    if not name:
        raise BadSetting(
            "this replica group has no name",
            remedy="Pass replica_id='r0' to ftcore.Manager or set FTCORE_REPLICA_ID; each group "
            "needs its own, and keeps it when it is restarted.",
        )
    return Place(
        lighthouse=endpoints,
        job=job or env.get("FTCORE_JOB", "default"),
        replica_id=name,
        rank=_whole(env, "RANK", 0),
        ranks=_whole(env, "WORLD_SIZE", 1),
        host=host or env.get("FTCORE_HOST", "") or _address_towards(endpoints[0]),
    )


def _endpoint(text: str) -> str:
    text = text.strip().removeprefix("http://")
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadSetting(f"the lighthouse address {text!r} is not HOST:PORT")
    return text


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    if not text.isdigit():
        raise BadSetting(f"{name} is {text!r}, not a whole number")
    return int(text)


def _address_towards(endpoint: str) -> str:
    """The address of the interface on which the lighthouse is reached. Sends nothing."""
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadSetting(
            f"the lighthouse host {host!r} is not known: {error.strerror or error}"
        ) from error


def current_env() -> Mapping[str, str]:
    return os.environ


def parse_limits(settings: Iterable[str]) -> dict[str, float | None]:
    """`name=seconds` each, of limits that there are. Raises BadSetting."""
    found: dict[str, float | None] = {}
    for text in settings:
        name, _, seconds = text.partition("=")
        if name not in RULES:
            raise BadSetting(f"{name!r} is no time limit", remedy=f"There are {', '.join(RULES)}.")
        try:
            found[name] = float(seconds)
        except ValueError:
            raise BadSetting(f"{text!r} is not NAME=SECONDS") from None
    return found


def manager_limits(ladder: Ladder) -> dict[str, float]:
    """What the manager process is told, by the names of its configuration."""
    names = ("attach_timeout_s", "hang_after_s", "greeting_timeout_s")
    return {"stopped_limit_s": ladder["detect_within_s"], **{n: ladder[n] for n in names}}
