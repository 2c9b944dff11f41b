"""Account for the time of one job: when it trained, when it stood still, and what that cost.

Pure: told of each fact and report with its time. Every interruption becomes one record. The ratio
is the effective training time ratio (ETTR) of Kokolis et al., "Revisiting Reliability in
Large-Scale Machine Learning Research Clusters", arXiv 2410.21680: productive time divided by the
wall-clock time that the job had. Steps computed again after going back to a checkpoint are not
productive: an interruption ends with the first step that nobody had committed before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, replace
from enum import Enum
from math import inf

from ftcore.wire.messages import Member, Quorum, Report, show_id
from lighthouse.core import Fact
from lighthouse.histogram import Histogram

RECORDS_MAX = 200
FINISHED = ("finished",)  # what a group says that leaves because there is nothing more to do


class Cause(Enum):
    START = "start"  # the job's first quorum, or a new one after all groups were gone
    LOST = "lost"  # a member died, hung, was cut off or evicted
    FAILED = "failed"  # a step failed on a living member
    JOINED = "joined"  # a group came (back) and healed; the others trained on meanwhile
    LEFT = "left"  # a group was drained; the others trained on meanwhile
    OTHER = "other"


PLANNED = frozenset({Cause.JOINED, Cause.LEFT, Cause.OTHER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds, one after the other. Ranks measure `group_s` and `heal_s`, the lighthouse the rest.

    noticed_s: from the last sign of life to the first word of trouble. quorum_s: until the new
    quorum was issued. group_s: process groups built. heal_s: state copied. first_step_s: the rest,
    until the first step was committed that nobody had committed before.
    """

    noticed_s: float = 0.0
    quorum_s: float = 0.0
    group_s: float = 0.0
    heal_s: float = 0.0
    first_step_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.noticed_s + self.quorum_s + self.group_s + self.heal_s + self.first_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One time that training stopped, or a planned change that made it wait.

    began_at, noticed_at, issued_at: on the clock of the lighthouse. highest: steps committed before
    it. ranks: those of the job when it was largest. held_s: how long the heals held the others, as
    these measured it. stopped_s: how long nothing new was computed.
    """

    number: int
    cause: Cause
    who: tuple[str, ...]
    reason: str
    began_at: float
    noticed_at: float
    highest: int
    issued_at: float = inf
    quorum_id: int = 0
    from_step: int = 0
    members: tuple[str, ...] = ()
    ranks: int = 0
    steps_repeated: int = 0
    phases: Phases = Phases()
    held_s: float = 0.0
    stopped_s: float = 0.0

    @property
    def is_planned(self) -> bool:
        """Whether the members trained on until the new quorum was there."""
        return self.cause in PLANNED

    @property
    def lost_rank_s(self) -> float:
        return self.stopped_s * self.ranks

    def to_json(self, *, wall_offset_s: float) -> dict[str, object]:
        """`wall_offset_s` is the wall clock minus the clock of the lighthouse."""
        return {
            "number": self.number,
            "began_unix_s": round(self.began_at + wall_offset_s, 3),
            "cause": self.cause.value,
            "who": list(self.who),
            "reason": self.reason,
            "quorum": show_id(self.quorum_id),
            "from_step": self.from_step,
            "members": list(self.members),
            "ranks": self.ranks,
            "phases": {k: round(v, 6) for k, v in asdict(self.phases).items()},
            "steps_repeated": self.steps_repeated,
            "held_s": round(self.held_s, 6),
            "stopped_s": round(self.stopped_s, 6),
            "lost_rank_s": round(self.lost_rank_s, 6),
        }


@dataclass(slots=True, kw_only=True)
class Seconds:
    """Where the time of a job went; `missing` is the part of ranks that were away meanwhile."""

    training: float = 0.0
    stopped: float = 0.0
    rank_training: float = 0.0
    rank_stopped: float = 0.0
    rank_missing: float = 0.0


class Goodput:
    """The books of one job. Every total only grows, so that Prometheus can take rates of it."""

    def __init__(self) -> None:
        self.open: Interruption | None = None
        self.records: deque[Interruption] = deque(maxlen=RECORDS_MAX)
        self.seconds = Seconds()
        self.counts: dict[Cause, int] = {}
        self.lost_rank_s: dict[Cause, float] = {}
        self.phases = {name: Histogram() for name in (*asdict(Phases()), "total_s")}
        self.steps_committed = 0
        self.steps_repeated = 0
        self._highest: int | None = None
        self._ranks = 0
        self._ranks_each = 1  # of a member whose addresses are not known: all groups are alike
        self._ranks_max = 0
        self._since: float | None = None  # up to here the time is booked; None: not running
        self._training_since = inf
        self._debt_s = 0.0  # booked as training, and was none: later training pays it back
        self._number = 0
        self._done_at: float | None = None  # of the open one: training goes on since then
        self._reported: set[str] = set()  # members whose times of the open one are known

    # What happens

    def hello(self, report: Report, standing: Quorum | None, now: float) -> None:
        """A group attached. The first one starts the clock; `standing` is the job's quorum."""
        self._ranks_each = max(1, len(report.member.heal_addresses))
        if self._since is None and not self._is_finished_report(report):
            self._since = now
            if standing is not None:
                self._set_ranks(standing.members)
                self._training_since = now
            else:
                self._begin(Cause.START, (), "no quorum yet", began_at=now, now=now)
        self.heard(report, now)

    def heard(self, report: Report, now: float) -> Interruption | None:
        """A report came in. Return the interruption that is over with it."""
        committed, highest = report.committed, self._highest
        if highest is not None and committed > highest:
            self.steps_committed += committed - highest
        self._highest = max(committed, highest or 0)
        return self._follow(self.open, report, now) if self.open is not None else None

    def told(
        self, fact: Fact, standing: Quorum | None, heard_at: float | None = None
    ) -> Interruption | None:
        """`heard_at`: the last sign of life of the member that the fact is about. Returns the
        interruption that was over before it."""
        ended = self._close(self.open) if self.open and self._done_at is not None else None
        match fact.what:
            case "member.lost" if fact.detail in FINISHED:
                self._finish(fact.at)
            case "member.lost":
                began_at = fact.at if heard_at is None else heard_at
                self._begin(Cause.LOST, (fact.about,), fact.detail, began_at=began_at, now=fact.at)
            case "change.started":
                self._change(fact)
            case "quorum.issued" if standing is not None:
                self._issued(standing, fact.at)
        return ended

    def settle(self, now: float) -> Seconds:
        """Book the time until `now` and return all totals."""
        if self._since is None:
            return self.seconds
        elapsed, self._since = max(0.0, now - self._since), max(now, self._since)
        if self._is_stopped:
            self.seconds.stopped += elapsed
            self.seconds.rank_stopped += elapsed * self._ranks_max
            return self.seconds
        paid = min(self._debt_s, elapsed)
        self._debt_s -= paid
        trained = elapsed - paid
        self.seconds.training += trained
        self.seconds.rank_training += trained * self._ranks
        self.seconds.rank_missing += trained * (self._ranks_max - self._ranks)
        return self.seconds

    def ettr(self, now: float) -> float:
        """Productive time / wall-clock time since the first group came; 0 before that."""
        total = self.settle(now)
        whole = total.training + total.stopped
        return total.training / whole if whole > 0 else 0.0

    def stopped_for_s(self, now: float) -> float:
        """How long nothing new has been computed; 0 while the job trains."""
        return now - self.open.began_at if self.open and self._is_stopped else 0.0

    # Inside

    @property
    def _is_stopped(self) -> bool:
        return self.open is not None and not self.open.is_planned and self._done_at is None

    def _is_finished_report(self, report: Report) -> bool:
        return report.want.name == "GONE"

    def _finish(self, now: float) -> None:
        """The job has done its work: its clock stands until somebody commits more."""
        self.settle(now)
        self.open, self._since = None, None

    def _change(self, fact: Fact) -> None:
        if fact.detail.startswith("a step failed on "):
            who = fact.detail.removeprefix("a step failed on ").partition(":")[0]
            self._begin(Cause.FAILED, (who,), fact.detail, began_at=fact.at, now=fact.at)
        elif fact.detail == "a member is lost" or self._since is None:
            return  # member.lost has told more
        else:
            who = fact.detail.removesuffix(" joins")
            is_join = fact.detail.endswith(" joins")
            is_leave = fact.detail == "a member leaves"
            cause = Cause.JOINED if is_join else Cause.LEFT if is_leave else Cause.OTHER
            self._begin(
                cause, (who,) if is_join else (), fact.detail, began_at=fact.at, now=fact.at
            )

    def _begin(
        self, cause: Cause, who: tuple[str, ...], reason: str, *, began_at: float, now: float
    ) -> None:
        """Open a record, or add to the open one: until training goes on it is one interruption."""
        if self._since is None:
            return
        self.settle(now)
        known = self.open
        if known is not None and (cause in PLANNED or not known.is_planned):
            self.open = _merged(known, cause, who, reason)
            return
        if cause not in PLANNED:
            began_at = self._take_back(began_at, now)
        self._number += known is None
        self.open = Interruption(
            number=self._number,
            cause=cause,
            who=who,
            reason=reason,
            began_at=began_at,
            noticed_at=now,
            highest=self._highest or 0,
            ranks=self._ranks_max,
        )

    def _take_back(self, began_at: float, now: float) -> float:
        """Book the time since `began_at`, which counted as training, as stopped."""
        began_at = min(now, max(began_at, min(self._training_since, now)))
        late_s = now - began_at
        self._debt_s += late_s
        self.seconds.stopped += late_s
        self.seconds.rank_stopped += late_s * self._ranks_max
        return began_at

    def _issued(self, quorum: Quorum, now: float) -> None:
        if self._since is None:
            self._since = now
        self.settle(now)
        if self.open is None:
            self._begin(Cause.OTHER, (), "a new quorum", began_at=now, now=now)
        assert self.open is not None
        self._set_ranks(quorum.members)
        self._reported = set()
        self.open = replace(
            self.open,
            issued_at=now,
            quorum_id=quorum.quorum_id,
            from_step=quorum.from_step,
            members=quorum.replica_ids,
            ranks=self._ranks_max,
            phases=Phases(),
        )

    def _set_ranks(self, members: tuple[Member, ...]) -> None:
        self._ranks = sum(len(m.heal_addresses) or self._ranks_each for m in members)
        self._ranks_max = max(self._ranks_max, self._ranks)

    def _follow(self, record: Interruption, report: Report, now: float) -> Interruption | None:
        """See from a report how far the recovery is; return the record when it is over and the
        times of all members are known."""
        if report.failed_id and report.failed_id < (record.quorum_id or inf):
            record = self.open = replace(record, steps_repeated=1)
        if not record.quorum_id or report.lineage != record.quorum_id:
            return None
        phases = replace(
            record.phases,
            group_s=max(record.phases.group_s, report.group_s),
            heal_s=max(record.phases.heal_s, report.heal_s),
        )
        held_s = max(record.held_s, report.held_s)
        record = self.open = replace(record, phases=phases, held_s=held_s)
        self._reported.add(report.member.replica_id)
        if self._done_at is None and (report.committed > record.highest or record.is_planned):
            self.settle(now)
            self._done_at = self._training_since = now
        is_known = self._reported >= set(record.members)
        return self._close(record) if is_known and self._done_at is not None else None

    def _close(self, record: Interruption) -> Interruption:
        assert self._done_at is not None
        done = _measured(record, self._done_at)
        self.open, self._done_at = None, None
        self.records.append(done)
        self.steps_repeated += done.steps_repeated
        self.counts[done.cause] = self.counts.get(done.cause, 0) + 1
        self.lost_rank_s[done.cause] = self.lost_rank_s.get(done.cause, 0.0) + done.lost_rank_s
        self._observe(done)
        if done.is_planned:  # it was booked as training
            self._debt_s += done.stopped_s
            self.seconds.stopped += done.stopped_s
            self.seconds.rank_stopped += done.lost_rank_s
        return done

    def _observe(self, done: Interruption) -> None:
        """Put a recovery into the histograms: no start, and of a planned change what it cost."""
        if done.cause is Cause.START:
            return
        always = () if done.is_planned else ("noticed_s", "quorum_s", "group_s", "first_step_s")
        for name, value in asdict(done.phases).items():
            is_cost = name in ("group_s", "heal_s") and value > 0
            if name in always or is_cost:
                self.phases[name].observe(value)
        self.phases["total_s"].observe(done.stopped_s)


def _merged(known: Interruption, cause: Cause, who: tuple[str, ...], reason: str) -> Interruption:
    """`known` after more happened. A lost member explains the failed steps of the others."""
    if cause is Cause.FAILED and known.cause is Cause.LOST:
        return known
    if cause is Cause.LOST and known.cause is Cause.FAILED:
        return replace(known, cause=cause, who=who, reason=reason)
    return replace(known, who=(*known.who, *(w for w in who if w not in known.who)))


def _measured(record: Interruption, now: float) -> Interruption:
    """The record with all phases. Those that ranks measured never exceed what passed here."""
    after_s = now - record.issued_at
    group_s = min(record.phases.group_s, after_s)
    heal_s = min(record.phases.heal_s, after_s - group_s)
    rest_s = after_s - group_s - heal_s
    phases = Phases(
        noticed_s=record.noticed_at - record.began_at,
        quorum_s=record.issued_at - record.noticed_at,
        group_s=group_s,
        heal_s=heal_s,
        first_step_s=0.0 if record.is_planned else rest_s,
    )
    rolled_back = max(0, record.highest - record.from_step)
    return replace(
        record,
        phases=phases,
        stopped_s=min(after_s, group_s + record.held_s)
        if record.is_planned
        else now - record.began_at,
        steps_repeated=record.steps_repeated + rolled_back,
    )


def sentence(record: Interruption) -> str:
    """One line for a person who looks at the history."""
    phases = {k.removesuffix("_s"): v for k, v in asdict(record.phases).items() if v >= 0.0005}
    if record.held_s >= 0.0005:
        phases["held the others"] = record.held_s
    parts = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in phases.items())
    return (
        f"{record.cause.value}: {record.reason}; stopped {record.stopped_s:.3f} s of "
        f"{record.ranks} ranks ({parts or 'nothing'} s), {record.steps_repeated} steps repeated"
    )


def summary(book: Goodput, now: float) -> dict[str, object]:
    """For /status and the dashboard. `goodput` is the ETTR; `last_recovery` in seconds."""
    total = book.settle(now)
    unplanned = [r for r in book.records if not r.is_planned]
    phases = asdict(unplanned[-1].phases) if unplanned else {}
    return {
        "goodput": round(book.ettr(now), 4),
        "trained_s": round(total.training, 3),
        "stopped_s": round(total.stopped, 3),
        "interruptions": sum(book.counts.values()),
        "lost_rank_s": round(sum(book.lost_rank_s.values()), 3),
        "steps_committed": book.steps_committed,
        "steps_repeated": book.steps_repeated,
        "last_recovery": {k.removesuffix("_s"): round(v, 4) for k, v in phases.items()},
    }
