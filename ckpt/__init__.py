"""Asynchronous sharded checkpoints that cannot be torn. Imports no torch until it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "Checkpointer": "ckpt.checkpointer",
    "Destination": "ckpt.daemon.orders",
    "Place": "ckpt.capture",
    "SaveHandle": "ckpt.handle",
    "per_rank": "ftcore.statedict.own",
}

if TYPE_CHECKING:
    from ckpt.capture import Place
    from ckpt.checkpointer import Checkpointer
    from ckpt.daemon.orders import Destination
    from ckpt.handle import SaveHandle
    from ftcore.statedict.own import per_rank

__all__ = ["Checkpointer", "Destination", "Place", "SaveHandle", "per_rank"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
