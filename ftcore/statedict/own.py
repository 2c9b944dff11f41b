"""Mark state that each rank has of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRank:
    """State that each rank has of its own, such as random generators and data loaders. A checkpoint
    stores it once per rank; a rank that has none in a checkpoint of another size keeps its own."""

    value: Any


def per_rank(value: Any) -> PerRank:
    """Mark a value of the state as this rank's own."""
    return PerRank(value=value)
