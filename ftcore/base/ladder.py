"""Derive every time limit from one number, and refuse limits that contradict each other.

`detect_within_s` says how long a silent or stopped group may stay unnoticed. Each other limit is a
multiple of it, unless it is given; what waits for work instead of for a sign of life has a floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ftcore.base.errors import BadSetting

BASE = "detect_within_s"
PREFIX = "FTCORE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A limit is `factor` times `of`, at least `floor_s` and at most `most_s`, unless given."""

    side: str  # who needs it: manager or lighthouse
    factor: float
    what: str
    of: str = BASE
    floor_s: float = 0.0
    most_s: float = inf
    may_be_off: bool = False  # 0 turns it off


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    name: str
    seconds: float
    source: str  # default, derived, argument, environment or option
    why: str
    side: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`low` has to be below `high`, or nobody would ever see `high` at work."""

    low: str
    high: str
    why: str


DEFAULT_S = 2.0
RULES: Mapping[str, Rule] = {
    BASE: Rule(side="both", factor=1, what="a stopped or silent group is given up"),
    "heartbeat_timeout_s": Rule(
        side="lighthouse", factor=1, what="silence after which a group is lost"
    ),
    "report_every_s": Rule(
        side="lighthouse", factor=1 / 4, of="heartbeat_timeout_s", what="groups report so often"
    ),
    "reattach_timeout_s": Rule(
        side="lighthouse",
        factor=1 / 2,
        of="heartbeat_timeout_s",
        most_s=0.5,
        what="a closed stream may come back",
    ),
    "lease_ttl_s": Rule(side="lighthouse", factor=1, what="a leader may be silent"),
    "learn_timeout_s": Rule(
        side="lighthouse",
        factor=2,
        of="heartbeat_timeout_s",
        what="a new leader waits for groups of the old one",
    ),
    "join_timeout_s": Rule(
        side="lighthouse", factor=5, floor_s=10.0, what="the first quorum waits for stragglers"
    ),
    "promise_timeout_s": Rule(
        side="lighthouse", factor=30, floor_s=60.0, what="a member may take to end its step"
    ),
    "greeting_timeout_s": Rule(
        side="manager",
        factor=1 / 2,
        floor_s=1.0,
        what="a lighthouse may take to answer before the next is tried",
    ),
    "attach_timeout_s": Rule(
        side="manager", factor=15, floor_s=30.0, what="a new group looks for a lighthouse"
    ),
    "collective_timeout_s": Rule(
        side="manager", factor=30, floor_s=60.0, what="a collective may take: the last resort"
    ),
    "hang_after_s": Rule(
        side="manager",
        factor=1 / 2,
        of="collective_timeout_s",
        may_be_off=True,
        what="a step may take before records are compared",
    ),
    "heal_timeout_s": Rule(
        side="manager", factor=300, floor_s=600.0, what="copying the state may take"
    ),
}
ORDERS = (
    Order(low="report_every_s", high="heartbeat_timeout_s", why="one late report is no death"),
    Order(low="reattach_timeout_s", high="heartbeat_timeout_s", why="a closed stream says more"),
    Order(low=BASE, high="collective_timeout_s", why="a death is seen before its collective ends"),
    Order(
        low="hang_after_s", high="collective_timeout_s", why="a hang is looked at before it ends"
    ),
    Order(low=BASE, high="heal_timeout_s", why="a source's death must not look like a slow heal"),
    Order(
        low="heartbeat_timeout_s", high="promise_timeout_s", why="a dead member promises nothing"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """All limits, each with where it comes from."""

    limits: Mapping[str, Limit]

    def __getitem__(self, name: str) -> float:
        return self.limits[name].seconds

    def to_json(self) -> dict[str, dict[str, Any]]:
        return {
            limit.name: {"seconds": limit.seconds, "source": limit.source, "why": limit.why}
            for limit in self.limits.values()
        }


def climb(
    given: Mapping[str, float | None] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    as_source: str = "argument",
) -> Ladder:
    """The ladder from arguments (None: not given), then FTCORE_<NAME> of the environment, then what
    follows from `detect_within_s`. Raises BadSetting, naming both values of a contradiction."""
    chosen = {name: value for name, value in (given or {}).items() if value is not None}
    limits: dict[str, Limit] = {}
    for name, rule in RULES.items():
        variable = PREFIX + name.upper()
        if name in chosen:
            seconds, source, why = float(chosen[name]), as_source, ""
        elif variable in (env or {}):
            seconds, source, why = _number(variable, (env or {})[variable]), "environment", variable
        elif name == BASE:
            seconds, source, why = DEFAULT_S, "default", ""
        else:
            seconds, why = _derived(rule, limits)
            source = "derived"
        limits[name] = Limit(
            name=name, seconds=seconds, source=source, why=why, side=rule.side, what=rule.what
        )
    _check(limits.values())
    return Ladder(limits=limits)


def _derived(rule: Rule, limits: Mapping[str, Limit]) -> tuple[float, str]:
    seconds = rule.factor * limits[rule.of].seconds
    times = f"{rule.of} × {rule.factor:g}"
    if seconds < rule.floor_s:
        return rule.floor_s, f"at least {rule.floor_s:g}; {times} is less"
    if seconds > rule.most_s:
        return rule.most_s, f"at most {rule.most_s:g}; {times} is more"
    return seconds, times


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadSetting(f"{name} is {text!r}, not a number of seconds") from None


def _check(limits: Iterable[Limit]) -> None:
    by_name = {limit.name: limit for limit in limits}
    for limit in by_name.values():
        is_off = limit.seconds == 0 and RULES[limit.name].may_be_off
        if not (0 < limit.seconds < inf or is_off):
            raise BadSetting(f"{_shown(limit)} is not a time above zero")
    for order in ORDERS:
        low, high = by_name[order.low], by_name[order.high]
        if low.seconds >= high.seconds:
            raise BadSetting(
                f"{_shown(low)} is not below {_shown(high)}: {order.why}",
                remedy=f"Raise {high.name} above {low.seconds:g} s or lower {low.name}; leave both "
                f"away to derive them from {BASE}.",
            )


def _shown(limit: Limit) -> str:
    return f"{limit.name} {limit.seconds:g} s ({limit.source})"


def ladder_text(ladder: Ladder) -> str:
    """A line a limit: name, seconds, source, what it is."""
    rows = [
        (
            limit.name,
            f"{limit.seconds:g} s",
            limit.source + (f" ({limit.why})" if limit.why else ""),
        )
        for limit in ladder.limits.values()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row, limit in zip(rows, ladder.limits.values(), strict=True):
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2])]
        lines.append("  ".join([*cells, f"{limit.side}: {limit.what}"]))
    return "\n".join(lines)
