"""Fault tolerance for PyTorch training. Imports no torch until it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "ElasticSampler": "ftcore.data.sampler",
    "Guards": "ftcore.guards",
    "Manager": "ftcore.manager",
    "wrap": "ftcore.elastic",
}

if TYPE_CHECKING:
    from ftcore.data.sampler import ElasticSampler
    from ftcore.elastic import wrap
    from ftcore.guards import Guards
    from ftcore.manager import Manager

__all__ = ["ElasticSampler", "Guards", "Manager", "wrap"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftcore' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
