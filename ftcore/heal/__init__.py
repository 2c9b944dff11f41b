"""Give a joining group the live state of the others: staged at a step boundary, served, healed."""

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
