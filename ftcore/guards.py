"""Decide whether a step may be committed, and which replica group is sick.

Pure: numbers in, verdicts out. All members see the same reduced numbers and, when they have asked
each other, the same words; so all reach the same verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import isfinite
from statistics import median

from ftcore.base.errors import BadSetting


class Finding(Enum):
    """Why a guard objects."""

    NOT_FINITE = "loss or gradient is not finite"
    NORM_SPIKE = "gradient norm is far above its recent median"
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
class Guards:
    """Which guards are on, and how strict. None or False turns one off. Equal in all groups.

    finite: refuse a step whose loss or gradient is nan or infinite. Off with float16 loss scaling,
        where infinite gradients are usual.
    norm_spike_factor: refuse a gradient norm above so many times the median of the last
        `norm_window_steps` committed steps, once there are `norm_warmup_steps` of them. The step is
        repeated on the same samples, so after `norm_spikes_max` refusals in a row it goes through.
    digest_every_steps: compare the parameters of all groups every so many steps, bit by bit. The
        odd one out copies the state of the others; after `digest_heals_max` times it is stopped,
        because its hardware is not to be trusted. Needs three groups to name one.
    straggler_factor: name groups whose own work takes more than so many times that of the others
        over `straggler_window_steps`; with `straggler_evict` they leave in good order.
    """

    finite: bool = True
    norm_spike_factor: float | None = None
    norm_window_steps: int = 64
    norm_warmup_steps: int = 16
    norm_spikes_max: int = 3
    digest_every_steps: int | None = None
    digest_heals_max: int = 1
    straggler_factor: float | None = 2.0
    straggler_window_steps: int = 16
    straggler_evict: bool = False

    def __post_init__(self) -> None:
        """Raises BadSetting with the name and value that cannot work."""
        for name in ("norm_spike_factor", "straggler_factor"):
            factor = getattr(self, name)
            if factor is not None and not factor > 1:
                raise BadSetting(f"{name} is {factor}, but 1 is the usual: it must be above")
        for name in ("norm_warmup_steps", "straggler_window_steps"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.digest_every_steps is not None and self.digest_every_steps < 1:
            raise BadSetting(f"digest_every_steps is {self.digest_every_steps}, not at least 1")
        if self.norm_window_steps < self.norm_warmup_steps:
            raise BadSetting(
                f"norm_window_steps {self.norm_window_steps} is shorter than norm_warmup_steps "
                f"{self.norm_warmup_steps}, so no spike would ever be seen"
            )


NO_GUARDS = Guards(finite=False, straggler_factor=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormHistory:
    """The gradient norms of the last committed steps. Part of the state that heals: a joiner
    without it would judge otherwise than the rest."""

    norms: tuple[float, ...] = ()
    spikes_in_a_row: int = 0

    def committed(self, norm: float, guards: Guards) -> NormHistory:
        """The next step's history. What is not finite says nothing about what is usual."""
        norms = (*self.norms, norm)[-guards.norm_window_steps :] if isfinite(norm) else self.norms
        return NormHistory(norms=norms)

    def refused(self) -> NormHistory:
        return replace(self, spikes_in_a_row=self.spikes_in_a_row + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What every member sees alike after a reduction."""

    step: int
    loss: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a member tells the others when they ask each other.

    refusals: norm spikes it has refused in a row. is_finite: whether what it brought to the sum
    was. busy_s: the median of its own work per shard over a whole window; 0 before.
    """

    refusals: int = 0
    is_finite: bool = True
    busy_s: float = 0.0
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`refusal`: why the step must not be committed. `straggler`: who is slow; no reason to refuse.
    `slowness`: by replica_id, how many times slower than the others; empty when not asked."""

    refusal: Objection | None = None
    straggler: Objection | None = None
    slowness: Mapping[str, float]
    history: NormHistory


def must_ask(seen: Seen, history: NormHistory, guards: Guards) -> bool:
    """Whether the members have to hear each other's words before they judge. All members agree on
    this without asking: their counts of refusals may differ, so these do not matter here."""
    uncounted = replace(history, spikes_in_a_row=0)
    return (
        _suspicion(seen, uncounted, guards) is not None
        or digest_is_due(seen.step, guards)
        or stragglers_are_due(seen.step, guards)
    )


def judge(seen: Seen, words: Mapping[str, Word], history: NormHistory, guards: Guards) -> Judgement:
    """The same on every member. `words` by replica_id, empty when nobody had to ask.

    A member whose reduction failed while others refused has counted fewer refusals than they have:
    the highest count holds for all.
    """
    refusals = max((w.refusals for w in words.values()), default=history.spikes_in_a_row)
    history = replace(history, spikes_in_a_row=refusals)
    slowness: Mapping[str, float] = {}
    straggler = None
    if stragglers_are_due(seen.step, guards):
        busy_s = {replica: word.busy_s for replica, word in words.items() if word.busy_s > 0}
        slowness, straggler = straggler_scores(busy_s), check_stragglers(busy_s, guards)
    digests = {replica: word.digest for replica, word in words.items()}
    odd = check_digests(digests) if digest_is_due(seen.step, guards) else None
    refusal = odd or _named(_suspicion(seen, history, guards), words)
    if refusal is not None and refusal.finding is Finding.NORM_SPIKE:
        history = history.refused()
    return Judgement(refusal=refusal, straggler=straggler, slowness=slowness, history=history)


def _suspicion(seen: Seen, history: NormHistory, guards: Guards) -> Objection | None:
    """What the reduced numbers alone say."""
    values = {"loss": seen.loss, "gradient norm": seen.norm}
    found = check_finite(values) if guards.finite else None
    return found or check_norm(seen.norm, history, guards)


def _named(found: Objection | None, words: Mapping[str, Word]) -> Objection | None:
    """Say whose part was not finite. A group that is whole itself cannot know."""
    if found is None or found.finding is not Finding.NOT_FINITE:
        return found
    whose = tuple(sorted(r for r, word in words.items() if not word.is_finite))
    why = f"{found.why}, brought by {', '.join(whose)}" if whose else found.why
    return replace(found, why=why, replica_ids=whose)


def check_finite(values: Mapping[str, float]) -> Objection | None:
    """Object to nan and infinity in `values` (name -> loss, gradient norm, …)."""
    bad = {name: value for name, value in values.items() if not isfinite(value)}
    if not bad:
        return None
    named = ", ".join(f"{name} is {value}" for name, value in sorted(bad.items()))
    return Objection(finding=Finding.NOT_FINITE, why=named)


def check_norm(norm: float, history: NormHistory, guards: Guards) -> Objection | None:
    """Object to a norm more than `norm_spike_factor` times the median of committed steps."""
    factor = guards.norm_spike_factor
    if factor is None or len(history.norms) < guards.norm_warmup_steps:
        return None
    usual = median(history.norms)
    if not norm > factor * usual or history.spikes_in_a_row >= guards.norm_spikes_max:
        return None
    why = (
        f"gradient norm {norm:.4g} is {norm / usual if usual else float('inf'):.3g} times the "
        f"median {usual:.4g} of {len(history.norms)} steps, more than {factor:g}"
    )
    return Objection(finding=Finding.NORM_SPIKE, why=why)


def digest_is_due(step: int, guards: Guards) -> bool:
    """Whether the replica groups compare digests of the state that this step began with."""
    every = guards.digest_every_steps
    return every is not None and step % every == 0


def check_digests(digests: Mapping[str, str]) -> Objection | None:
    """Name the replica groups whose digest is not the majority's.

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


def stragglers_are_due(step: int, guards: Guards) -> bool:
    """Once in a window: the first one is over before the members ask each other."""
    return guards.straggler_factor is not None and step % guards.straggler_window_steps == 0


def straggler_scores(busy_s: Mapping[str, float]) -> dict[str, float]:
    """How many times slower than the others each replica group is: its time over the median of
    theirs.

    `busy_s` are the seconds a shard that the group spent on its own work. Whole step times are
    useless here: in a reduction everyone waits for the slowest.
    """
    scores = {}
    for replica, mine in busy_s.items():
        others = [value for other, value in busy_s.items() if other != replica]
        usual = median(others) if others else mine
        scores[replica] = mine / usual if usual > 0 else 1.0
    return scores


def check_stragglers(busy_s: Mapping[str, float], guards: Guards) -> Objection | None:
    """Name the replica groups that are too slow, slowest first."""
    factor = guards.straggler_factor
    if factor is None:
        return None
    scores = straggler_scores(busy_s)
    slow = sorted((r for r, s in scores.items() if s > factor), key=lambda r: -scores[r])
    if not slow:
        return None
    named = ", ".join(f"{r} takes {scores[r]:.2f} times" for r in slow)
    why = f"{named} the usual time of a shard, more than {factor:g}"
    return Objection(finding=Finding.STRAGGLER, why=why, replica_ids=tuple(slow))
