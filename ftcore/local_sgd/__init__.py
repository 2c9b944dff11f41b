"""Semi-synchronous training: many inner steps alone, then one outer step with all groups."""

from __future__ import annotations

from ftcore.local_sgd.outer import DiLoCo, OuterSteps, local_sgd

__all__ = ["DiLoCo", "OuterSteps", "local_sgd"]
