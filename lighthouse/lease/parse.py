"""Turn `--lease` into a lease."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from lighthouse.lease.api import Lease, Timing
from lighthouse.lease.errors import BadLease
from lighthouse.lease.etcd import EtcdLease
from lighthouse.lease.file import FileLease
from lighthouse.lease.kubernetes import KubernetesLease
from lighthouse.lease.memory import MemoryLease, MemoryStore

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
ENDPOINT = re.compile(r"(https?://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")
PREFIX = "/ftcore/lighthouse/"


def parse_lease(text: str, *, timing: Timing | None = None) -> Lease:
    """`memory`, `file:PATH`, `etcd:HOST:PORT,…[/PREFIX]` or `kubernetes:NAMESPACE/NAME`.

    Raises BadLease with what is wrong. Connects to nothing yet.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise BadLease(f"--lease {text!r}: {kind!r} is no kind of lease")
    timing = timing or Timing()
    if timing.ttl_s < 1 or (kind in ("etcd", "kubernetes") and timing.ttl_s % 1):
        raise BadLease(
            f"--lease-ttl {timing.ttl_s:g} does not suit a {kind} lease",
            remedy="Use whole seconds, 1 or more; 2 is usual.",
        )
    return KINDS[kind](rest, timing)


def _memory(rest: str, timing: Timing) -> Lease:
    if rest:
        raise BadLease(f"--lease memory:{rest!r}: memory takes no argument")
    return MemoryLease(MemoryStore(), timing=timing)


def _file(rest: str, timing: Timing) -> Lease:
    path = Path(rest)
    if not rest or (path.exists() and not path.is_dir()):
        raise BadLease(f"--lease file:{rest}: name a directory, existing or new")
    return FileLease(path, timing=timing)


def _etcd(rest: str, timing: Timing) -> Lease:
    scheme_end = rest.rfind("://") + 3 if "://" in rest else 0
    slash = rest.find("/", scheme_end)
    hosts, prefix = (rest, "") if slash < 0 else (rest[:slash], rest[slash:])
    endpoints = hosts.split(",")
    for endpoint in endpoints:
        match = ENDPOINT.fullmatch(endpoint)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise BadLease(f"--lease etcd:{rest}: {endpoint!r} is not HOST:PORT")
    return EtcdLease(
        endpoints, prefix=(prefix.rstrip("/") + "/") if prefix else PREFIX, timing=timing
    )


def _kubernetes(rest: str, timing: Timing) -> Lease:
    namespace, _, name = rest.partition("/")
    for what, label in (("namespace", namespace), ("name", name)):
        if not DNS_LABEL.fullmatch(label):
            raise BadLease(f"--lease kubernetes:{rest}: {label!r} is no valid {what}")
    return KubernetesLease(namespace, name, timing=timing)


KINDS: dict[str, Callable[[str, Timing], Lease]] = {
    "memory": _memory,
    "file": _file,
    "etcd": _etcd,
    "kubernetes": _kubernetes,
}
