"""A group over gloo that can be aborted: by cutting its sockets, since gloo cannot do it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcore.process_group import sockets
from ftcore.process_group.base import Group, Quorum
from ftcore.process_group.naming import name_in_records
from ftcore.process_group.store import connect_store
from ftcore.process_group.work import GroupWork, joined

# Only one gloo device at a time may appear among this process's sockets, or they get confused.
_one_device_at_a_time = threading.Lock()
_THREADS_PER_GROUP = 2  # gloo's own default


class GlooLink:
    """The gloo backend of one quorum and the sockets under it."""

    def __init__(self, backend: object, connections: tuple[sockets.SocketId, ...]) -> None:
        self.backend = backend
        self._connections = connections

    def cut(self) -> None:
        sockets.cut(self._connections)


class GlooGroup(Group):
    """For CPU tensors. `interface` is the address of this machine that its peers can reach."""

    backend_name = "gloo"

    def __init__(self, *, interface: str = "127.0.0.1", hold_errors: bool = False) -> None:
        super().__init__(hold_errors=hold_errors)
        self._interface = interface

    def gather_slices(self, whole: torch.Tensor, sizes: Sequence[int]) -> GroupWork:
        """By broadcasts, all at once: 100 MB on 3 ranks take 46 ms so, 70 by gloo's ring."""
        options = [c10d.BroadcastOptions() for _ in sizes]
        for rank, option in enumerate(options):
            option.rootRank = rank
        parts = whole.split(list(sizes))
        return joined(
            [
                self.broadcast([part], option)
                for part, option in zip(parts, options, strict=True)
                if part.numel()
            ]
        )

    def _connect(self, quorum: Quorum) -> GlooLink:
        client = connect_store(quorum.store_address, timeout_s=quorum.timeout_s)
        store = dist.PrefixStore(quorum.prefix, client)
        device, mine = _new_device(self._interface)
        store.set(f"device/{quorum.rank}", f"{mine[0]} {mine[1]}")
        keys = [f"device/{rank}" for rank in range(quorum.world_size)]
        peers = {_address(text) for text in store.multi_get(keys)} - {mine}
        backend = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store),
            quorum.rank,
            quorum.world_size,
            _options(device, quorum),
        )
        name_in_records(backend, "cpu", quorum.prefix)
        return GlooLink(backend, sockets.connected_with(mine, peers))


def _new_device(interface: str) -> tuple[object, sockets.Address]:
    make = dist.ProcessGroupGloo.create_device
    with _one_device_at_a_time:
        return sockets.listener_made_by(lambda: make(hostname=interface))


def _options(device: object, quorum: Quorum) -> object:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=quorum.timeout_s)
    options._threads = _THREADS_PER_GROUP
    return options


def _address(text: bytes) -> sockets.Address:
    host, port = text.decode().split()
    return host, int(port)
