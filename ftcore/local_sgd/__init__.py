"""Semi-synchronous training: many inner steps alone, then one outer step with all groups."""

from __future__ import annotations

from ftcore.local_sgd.outer import OuterSteps, diloco, local_sgd

__all__ = ["OuterSteps", "diloco", "local_sgd"]
