"""Start the manager process of a replica group, or learn from group rank 0 where it listens."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from ftcore.base.machine import this_machine
from ftcore.errors import ManagerNotStarted
from ftcore.settings import Place, current_env


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerAddress:
    """Where the manager listens. Goes from group rank 0 to the other ranks as JSON."""

    unix: str
    tcp: str
    machine: str
    token: str


def find_manager(
    place: Place, limits: Mapping[str, float], store: dist.Store | None
) -> ManagerAddress:
    """Rank 0 starts the manager; the others learn from it, through their `store`, where it is."""
    if store is None:
        return start_manager(place, limits, listen_host="")
    # torchrun keeps its store when it restarts the ranks: each life has a key of its own
    key = f"manager/{current_env().get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank == 0:
        started = start_manager(place, limits, listen_host=place.host)
        store.set(key, json.dumps(asdict(started)))
        return started
    return ManagerAddress(**json.loads(store.get(key)))


def start_manager(place: Place, limits: Mapping[str, float], *, listen_host: str) -> ManagerAddress:
    """Start the manager process of this group; it ends with this process. Raises
    ManagerNotStarted."""
    token = secrets.token_hex(16)
    config: dict[str, Any] = {
        "job": place.job,
        "replica_id": place.replica_id,
        "incarnation": time.time_ns(),
        "ranks": place.ranks,
        "endpoints": place.lighthouse,
        "listen_host": listen_host,
        "log_level": current_env().get("FTCORE_LOG_LEVEL", "WARNING"),
        "token": token,
        "parent_pid": os.getpid(),
        **limits,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "ftcore.daemon", json.dumps(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ManagerNotStarted(f"the manager ended with exit code {process.wait()}")
    listens = json.loads(line)
    return ManagerAddress(
        unix=listens["unix"], tcp=listens["tcp"], machine=this_machine(), token=token
    )


def find_store(place: Place) -> dist.Store | None:
    """The store that the ranks of one replica group share: torchrun's. None for a rank alone."""
    if place.ranks == 1:
        return None
    if dist.is_initialized():
        return dist.PrefixStore("ftcore", dist.distributed_c10d._get_default_store())
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.ranks))
    return dist.PrefixStore("ftcore", store)
