"""Decide whether a step may be committed, and which replica group is sick.

Pure: numbers in, verdicts out. All members that see the same numbers reach the same verdict, so a
guard that looks at reduced values (gradient norm, loss mean) needs no message of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import isfinite
from statistics import median


class Finding(Enum):
    """Why a guard objects."""

    NOT_FINITE = "loss or gradient is not finite"
    NORM_SPIKE = "gradient norm far above its recent median"
    DIGEST_DIFFERS = "state differs from the other replica groups"
    DIGEST_TIE = "replica groups differ in state and none is in the majority"
    STRAGGLER = "replica group is slower than the others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """A step, or a replica group, is not all right. `why` is a sentence with the numbers."""

    finding: Finding
    why: str
    replica_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """Which guards are on, and how strict. None or False turns one off.

    Danger of too small a norm_spike_factor: a step is repeated on the same samples and would be
    refused again, so after `norm_spikes_max` refusals in a row the step is let through.
    """

    finite: bool = True
    norm_spike_factor: float | None = None
    norm_window_steps: int = 64
    norm_warmup_steps: int = 16
    norm_spikes_max: int = 3
    digest_every_steps: int | None = None
    straggler_factor: float | None = 2.0
    straggler_window_steps: int = 16
    straggler_evict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormHistory:
    """The gradient norms of the last committed steps. Part of the state that heals: a joiner
    without it would judge otherwise than the rest."""

    norms: tuple[float, ...] = ()
    spikes_in_a_row: int = 0

    def committed(self, norm: float, policy: GuardPolicy) -> NormHistory:
        norms = (*self.norms, norm)[-policy.norm_window_steps :]
        return NormHistory(norms=norms)

    def refused(self) -> NormHistory:
        return replace(self, spikes_in_a_row=self.spikes_in_a_row + 1)


def check_finite(values: Mapping[str, float]) -> Objection | None:
    """Object to nan and infinity in `values` (name -> loss, gradient norm, …)."""
    bad = {name: value for name, value in values.items() if not isfinite(value)}
    if not bad:
        return None
    named = ", ".join(f"{name} is {value}" for name, value in sorted(bad.items()))
    return Objection(finding=Finding.NOT_FINITE, why=named)


def check_norm(norm: float, history: NormHistory, policy: GuardPolicy) -> Objection | None:
    """Object to a norm more than `norm_spike_factor` times the median of committed steps."""
    factor = policy.norm_spike_factor
    if factor is None or len(history.norms) < policy.norm_warmup_steps:
        return None
    usual = median(history.norms)
    if norm <= factor * usual or history.spikes_in_a_row >= policy.norm_spikes_max:
        return None
    why = (
        f"gradient norm {norm:.4g} is {norm / usual if usual else float('inf'):.3g} times the "
        f"median {usual:.4g} of {len(history.norms)} steps, more than {factor:g}"
    )
    return Objection(finding=Finding.NORM_SPIKE, why=why)


def digest_is_due(step: int, policy: GuardPolicy) -> bool:
    """Whether the replica groups compare digests of their state after this step."""
    every = policy.digest_every_steps
    return every is not None and step % every == 0


def check_digests(digests: Mapping[str, str]) -> Objection | None:
    """Name the replica groups whose digest is not the majority's. They should leave and heal.

    With two groups, or a tie, somebody is wrong but nobody can tell who: nobody is named.
    """
    counts = Counter(digests.values())
    if len(counts) <= 1:
        return None
    best, votes = counts.most_common(1)[0]
    if 2 * votes <= len(digests):
        shown = ", ".join(f"{r} has {d[:12]}" for r, d in sorted(digests.items()))
        return Objection(finding=Finding.DIGEST_TIE, why=f"no majority: {shown}")
    odd = tuple(sorted(r for r, digest in digests.items() if digest != best))
    why = f"{', '.join(odd)} differ from the digest {best[:12]} of {votes} replica groups"
    return Objection(finding=Finding.DIGEST_DIFFERS, why=why, replica_ids=odd)


def straggler_scores(busy_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How many times slower than the others each replica group is: its median time over the
    median of the others' medians.

    `busy_s` are the seconds of recent steps that the group spent on its own work. Whole step times
    are useless here: in a reduction everyone waits for the slowest.
    """
    own = {replica: median(times) for replica, times in busy_s.items() if times}
    scores = {}
    for replica, mine in own.items():
        others = [value for other, value in own.items() if other != replica]
        usual = median(others) if others else mine
        scores[replica] = mine / usual if usual > 0 else 1.0
    return scores


def check_stragglers(
    busy_s: Mapping[str, Sequence[float]], policy: GuardPolicy
) -> Objection | None:
    """Name the replica groups that were too slow over a whole window, slowest first."""
    factor, window = policy.straggler_factor, policy.straggler_window_steps
    if factor is None:
        return None
    recent = {r: times[-window:] for r, times in busy_s.items() if len(times) >= window}
    scores = straggler_scores(recent)
    slow = sorted((r for r, s in scores.items() if s > factor), key=lambda r: -scores[r])
    if not slow:
        return None
    named = ", ".join(f"{r} takes {scores[r]:.2f} times" for r in slow)
    why = f"{named} the usual time of a step, more than {factor:g}"
    return Objection(finding=Finding.STRAGGLER, why=why, replica_ids=tuple(slow))
