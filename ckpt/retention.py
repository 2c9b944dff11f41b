"""Decide which steps to delete. Pure; the newest complete step is never among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from ckpt.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What retention may look at. Only complete steps have facts."""

    step: int
    created_unix_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A step is kept if any rule keeps it. Without rules all steps are kept."""

    keep_last: int | None = None
    keep_every: int | None = None  # steps
    keep_best: int | None = None  # by `metric`
    metric: str = "loss"
    best_is: str = "lowest"  # or "highest"
    keep_younger_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "keep_younger_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise CheckpointError(
                    f"{name} is {value}", remedy=f"Give {name} a value above 0, or None."
                )
        if self.best_is not in ("lowest", "highest"):
            raise CheckpointError(
                f"best_is is {self.best_is!r}", remedy="Use 'lowest' or 'highest'."
            )

    @property
    def keeps_all(self) -> bool:
        rules = (self.keep_last, self.keep_every, self.keep_best, self.keep_younger_s)
        return all(rule is None for rule in rules)

    @property
    def needs_manifests(self) -> bool:
        return self.keep_best is not None or self.keep_younger_s is not None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Policy:
        return cls(**content)


def plan_deletes(
    steps: Sequence[StepFacts],
    policy: Policy,
    *,
    now_unix_s: float,
    just_committed: int | None = None,
) -> list[int]:
    """Steps to delete, oldest first. `just_committed` stays even below the steps of another run
    that was here before, or a fresh run in an old directory would lose its only step."""
    if not steps or policy.keeps_all:
        return []
    ordered = sorted(steps, key=lambda s: s.step)
    kept = {ordered[-1].step, just_committed} | {s.step for s in ordered if s.pinned}
    if policy.keep_last is not None:
        kept |= {s.step for s in ordered[-policy.keep_last :]}
    if policy.keep_every is not None:
        kept |= {s.step for s in ordered if s.step % policy.keep_every == 0}
    if policy.keep_best is not None:
        kept |= {s.step for s in _best(ordered, policy)[: policy.keep_best]}
    if policy.keep_younger_s is not None:
        # A clock that runs ahead makes a step younger, never older: it is kept.
        horizon = now_unix_s - policy.keep_younger_s
        kept |= {s.step for s in ordered if s.created_unix_s >= horizon}
    return [s.step for s in ordered if s.step not in kept]


def _best(steps: Sequence[StepFacts], policy: Policy) -> list[StepFacts]:
    sign = 1 if policy.best_is == "lowest" else -1
    rated = [s for s in steps if isfinite(s.metrics.get(policy.metric, nan))]
    return sorted(rated, key=lambda s: (sign * s.metrics[policy.metric], -s.step))
