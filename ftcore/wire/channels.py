"""Open gRPC channels to a lighthouse: plain text, TLS or mutual TLS, and this job's token."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

LEADER = "ftcore-leader"  # trailing metadata: where a follower says that the leader is


def open_channel(
    endpoint: str,
    options: Sequence[tuple[str, object]] = (),
    environ: Mapping[str, str] = os.environ,
) -> grpc.aio.Channel:
    """`host:port`, encrypted when FTCORE_TLS_CA (a PEM file, or `system`) is set.

    FTCORE_TLS_CERT and FTCORE_TLS_KEY are this client's own certificate, for mutual TLS. Files are
    read at each call, so renewed certificates are used without restart.
    """
    address = endpoint.removeprefix("http://").removeprefix("https://").rstrip("/")
    authority = environ.get("FTCORE_TLS_CA", "")
    if not authority and not endpoint.startswith("https://"):
        return grpc.aio.insecure_channel(address, options=list(options))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=None if authority in ("", "system") else Path(authority).read_bytes(),
        private_key=_read(environ.get("FTCORE_TLS_KEY")),
        certificate_chain=_read(environ.get("FTCORE_TLS_CERT")),
    )
    return grpc.aio.secure_channel(address, credentials, options=list(options))


def token_metadata(environ: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """The job's bearer token, from the file FTCORE_TOKEN_FILE or from FTCORE_TOKEN."""
    path = environ.get("FTCORE_TOKEN_FILE")
    token = Path(path).read_text().strip() if path else environ.get("FTCORE_TOKEN", "")
    return (("authorization", f"Bearer {token}"),) if token else ()


def leader_of(error: grpc.aio.AioRpcError) -> str:
    """Where a follower that refused says that the leader is, or nothing."""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == LEADER:
            return value if isinstance(value, str) else value.decode()
    return ""


def _read(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path else None
