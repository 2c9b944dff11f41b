"""Fill a state from a checkpoint that somebody else wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt.capture import Place, Planner
from ckpt.interop.dcp_read import StockDcpTier
from ckpt.interop.errors import ForeignFormat
from ckpt.interop.safetensors_read import SafetensorsTier
from ckpt.loading import Request, as_select
from ckpt.meet import default_meeting, default_place
from ckpt.restore import Restored, Restorer
from ckpt.stores import Store, open_store
from ckpt.tiers import Tier

Rename = Callable[[str], str | None]


def restore_foreign(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    strict: bool = True,
    only: str | Iterable[str] | Callable[[str], bool] | None = None,
    rename: Rename = lambda name: name,
    place: Place | None = None,
    **options: Any,
) -> Restored:
    """Fill `state` from a stock DCP directory, or from one *.safetensors file or a directory of
    them (with or without an index), and say what was read.

    `rename` gives each stored name its name in `state` (`lambda n: "model." + n` for a model file
    of Hugging Face), or None to leave it out. Sharded states read only what they hold. Raises
    StateMismatch before anything is changed, ForeignFormat when the files cannot be read. These
    formats have no checksums: damage that changes no size is not noticed.
    """
    store, single = _open(os.fspath(url), options)
    try:
        tier = tier_of(store, single, rename)
        where = place or default_place()
        meeting, planner = default_meeting(where), Planner()
        restorer = Restorer(state, [tier], place=where, meeting=meeting, planner=planner)
        request = Request(step=0, strict=strict, select=as_select(only), allow_fallback=False)
        restored = restorer.run(request)
    finally:
        store.close()
    if restored is None:
        raise ForeignFormat(f"{url} cannot be read", url=str(url))
    return restored


def _open(url: str, options: Mapping[str, Any]) -> tuple[Store, str | None]:
    """The store of a directory, and the file's name when the URL is one file."""
    if url.endswith(".safetensors"):
        directory, _, name = url.rpartition("/")
        return open_store(directory or ".", **options), name
    return open_store(url, **options), None


def tier_of(store: Store, single: str | None, rename: Rename) -> Tier:
    """What kind of checkpoint lies there. Raises ForeignFormat when it is none we know."""
    if single is not None:
        return SafetensorsTier(store, [single], rename)
    names = [info.key for info in store.list()]
    if ".metadata" in names:
        return StockDcpTier(store, rename)
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if files:
        return SafetensorsTier(store, files, rename)
    raise ForeignFormat(f"{store.url} has neither .metadata nor *.safetensors", url=store.url)
