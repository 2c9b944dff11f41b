"""Restore the newest complete step from the nearest tier, and fall back when bytes are bad.

Order of work: match names, read and check everything, then change the state. Whatever fails before
the last part leaves the state as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.capture import Place, Planner
from ckpt.errors import CheckpointError, StateMismatch
from ckpt.loading import Loading, Request
from ckpt.manifest import Manifest
from ckpt.meet import Meeting
from ckpt.reading import Report
from ckpt.tiers import Tier, is_partial
from ftcore.base.errors import FtError
from ftcore.base.log import event

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored, from where, how fast, and what was tried before."""

    step: int
    attempt: str
    tier: str
    bytes: int
    seconds: float
    report: Report
    skipped: tuple[str, ...] = ()
    metrics: Mapping[str, float]


class Restorer:
    """One restore of one state by one rank."""

    def __init__(
        self,
        state: Mapping[str, Any],
        tiers: Sequence[Tier],
        *,
        place: Place,
        meeting: Meeting,
        planner: Planner,
    ) -> None:
        self._state, self._tiers, self._planner = state, tiers, planner
        self._place, self._meeting = place, meeting
        self._skipped: list[str] = []

    def run(self, request: Request) -> Restored | None:
        """Restore, or return None when no tier has a complete step for all ranks."""
        started = time.monotonic()
        refused: set[tuple[int, str]] = set()
        last_error: CheckpointError | None = None
        while True:
            offers = self._offers(request, refused)
            chosen = self._agree(offers)
            if chosen is None:
                if last_error is not None:
                    raise last_error
                return None
            done, error = self._try(chosen, offers[chosen], request, started)
            if done is not None:
                return done
            last_error = error or last_error
            refused.add(chosen)
            if not request.allow_fallback and last_error is not None:
                raise last_error

    def _offers(
        self, request: Request, refused: set[tuple[int, str]]
    ) -> dict[tuple[int, str], list[tuple[Tier, Manifest]]]:
        """What this rank could restore: by (step, attempt), the tiers that have it, nearest first.

        With one rank only the newest step's manifest is read.
        """
        offers: dict[tuple[int, str], list[tuple[Tier, Manifest]]] = {}
        known = [(tier, step) for tier in self._tiers for step in self._steps(tier)]
        steps = sorted({s for _, s in known}, reverse=True)
        if request.step is not None:
            steps = [s for s in steps if s == request.step]
        for step in steps:
            for tier in (t for t, s in known if s == step):
                manifest = self._manifest(tier, step)
                if manifest is not None and (step, manifest.attempt) not in refused:
                    offers.setdefault((step, manifest.attempt), []).append((tier, manifest))
            if offers and self._place.ranks == 1:
                break
            if len(offers) >= 4:
                break
        return offers

    def _steps(self, tier: Tier) -> list[int]:
        try:
            return [step for step, _ in tier.steps()]
        except (FtError, OSError) as error:
            self._skip(f"{tier.name}: {error}")
            return []

    def _manifest(self, tier: Tier, step: int) -> Manifest | None:
        try:
            return tier.manifest(step)
        except (FtError, OSError) as error:
            self._skip(f"{tier.name} step {step}: {error}")
            return None

    def _skip(self, text: str) -> None:
        if text not in self._skipped:
            self._skipped.append(text)
            event(log, "restore.skipped", level=logging.WARNING, reason=text)

    def _agree(self, offers: Mapping[tuple[int, str], object]) -> tuple[int, str] | None:
        """The newest step that every rank can restore."""
        mine = [list(key) for key in offers]
        all_of = [{(s, a) for s, a in given} for given in self._meeting.exchange(mine)]
        common = set.intersection(*all_of)
        return max(common, default=None)

    def _try(
        self,
        chosen: tuple[int, str],
        tiers: Sequence[tuple[Tier, Manifest]],
        request: Request,
        started: float,
    ) -> tuple[Restored | None, CheckpointError | None]:
        """Read one step from its tiers in turn; change the state only when every rank has read."""
        last: CheckpointError | None = None
        loading: Loading | None = None
        try:
            for tier, manifest in tiers:
                loading = Loading(self._state, manifest, self._place, request, self._planner)
                try:
                    loading.read(tier)
                    break
                except (FtError, OSError) as error:
                    if isinstance(error, StateMismatch) and not is_partial(tier):
                        raise
                    last = as_checkpoint_error(error)
                    self._skip(f"{tier.name} step {chosen[0]}: {error}")
                    loading.undo()
                    loading = None
        except BaseException as error:
            self._meeting.exchange(f"{type(error).__name__}: {error}")
            raise
        answers = self._meeting.exchange("" if loading is not None else str(last))
        if loading is None or any(answers):
            if loading is not None:
                loading.undo()
            return None, last or CheckpointError(
                f"another rank failed: {next(filter(None, answers))}"
            )
        with loading:
            loading.apply()
        done = Restored(
            step=chosen[0],
            attempt=chosen[1],
            tier=tier.name,
            bytes=loading.plan.bytes,
            seconds=time.monotonic() - started,
            report=loading.plan.report,
            skipped=tuple(self._skipped),
            metrics=manifest.metrics,
        )
        event(log, "restored", step=done.step, tier=done.tier, seconds=done.seconds)
        return done, None


def as_checkpoint_error(error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    remedy = getattr(error, "remedy", None) or CheckpointError.remedy
    return CheckpointError(f"{type(error).__name__}: {error}", remedy=remedy)
