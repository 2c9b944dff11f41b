"""Host a rendezvous store in this process, on one interface, at a port that the kernel picks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ftcore.base.errors import BadSetting


@dataclass(frozen=True, slots=True)
class HostedStore:
    """A TCPStore server. It serves until this object and its `store` are dropped."""

    store: dist.TCPStore
    address: str


def host_store(interface: str = "127.0.0.1") -> HostedStore:
    """Serve a TCPStore on `interface` (an address or name of this machine) only.

    The socket is bound here and handed over, because TCPStore by itself listens on every interface.
    """
    listener = _listen(interface)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        interface,
        port,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return HostedStore(store=store, address=join_address(interface, port))


def _listen(interface: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    try:
        return socket.create_server((interface, 0), family=family, backlog=1024)
    except OSError as error:
        raise BadSetting(
            f"no store can listen on {interface}: {error.strerror or error}",
            remedy="Give an address or name of an interface of this machine, such as 127.0.0.1.",
            interface=interface,
        ) from error


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BadSetting(
            f"store address {address!r} is not host:port",
            remedy="Give the address as host:port, such as 10.0.0.3:29500 or [::1]:29500.",
            address=address,
        )
    return host.strip("[]"), int(port)


def connect_store(address: str, *, timeout_s: float) -> dist.TCPStore:
    """Return a client. Raises torch's DistNetworkError when nobody answers within `timeout_s`."""
    host, port = split_address(address)
    return dist.TCPStore(
        host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False
    )
