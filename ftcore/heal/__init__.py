"""Give a joining group the live state of the others: staged at a step boundary, served, healed.

Imports no torch until it is used: the manager process speaks its frames, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "HealFailed": "errors",
    "HealProgress": "client",
    "HealReport": "client",
    "HealServer": "server",
    "Offer": "server",
    "OfferRefused": "errors",
    "Partial": "partial",
    "SourceLost": "errors",
    "SourceReport": "client",
    "heal": "client",
}

if TYPE_CHECKING:
    from ftcore.heal.client import HealProgress, HealReport, SourceReport, heal
    from ftcore.heal.errors import HealFailed, OfferRefused, SourceLost
    from ftcore.heal.partial import Partial
    from ftcore.heal.server import HealServer, Offer

__all__ = [
    "HealFailed",
    "HealProgress",
    "HealReport",
    "HealServer",
    "Offer",
    "OfferRefused",
    "Partial",
    "SourceLost",
    "SourceReport",
    "heal",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftcore.heal' has no attribute {name!r}")
    return getattr(import_module(f"ftcore.heal.{_HOMES[name]}"), name)
