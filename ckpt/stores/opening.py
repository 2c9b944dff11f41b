"""Pick the store of a URL."""

from __future__ import annotations

from typing import Any

from ckpt.stores.base import Limits, Store
from ckpt.stores.file import FileStore
from ckpt.stores.memory import MemoryStore


def open_store(url: str, *, limits: Limits | None = None, **options: Any) -> Store:
    """The store at `url`: a path, `file://`, `memory://`, `s3://`, or any other URL of fsspec.

    `options` go to the store. For `s3://`: endpoint_url, region, profile, key, secret, token
    (default: AWS_* variables and files), or `client="s3fs"` to go through s3fs with the options of
    s3fs. Opening asks nothing of the store; the first call does.
    """
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme == "file":
        return FileStore(url, limits)
    if scheme == "memory":
        return MemoryStore(url, limits)
    if scheme == "s3" and options.pop("client", "direct") == "direct":
        from ckpt.stores.s3 import S3Store  # botocore costs 0.3 s of import
        from ckpt.stores.s3_signer import S3Options

        return S3Store(url, limits, S3Options(**options))
    from ckpt.stores.fsspec_store import FsspecStore

    return FsspecStore(url, limits, options)
