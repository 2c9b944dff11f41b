"""Who leads: a lease with a term that only grows, and writes that only its holder can make."""

from lighthouse.lease.api import Grant, Holder, Lease, Timing, monotonic_s
from lighthouse.lease.errors import BadLease, LeaseLost, LeaseUnreachable, RecordTooLarge
from lighthouse.lease.parse import parse_lease

__all__ = [
    "BadLease",
    "Grant",
    "Holder",
    "Lease",
    "LeaseLost",
    "LeaseUnreachable",
    "RecordTooLarge",
    "Timing",
    "monotonic_s",
    "parse_lease",
]
