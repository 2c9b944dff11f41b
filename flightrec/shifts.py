"""Decide whether a rank left calls out, put calls in, or called something else in one place.

The calls after a difference tell: they fit again when one of the two sides is moved by the number
of calls that the other lacks. Where the others hang at once and show no more calls, the group's own
past stands in for their future, for training repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flightrec.compare import Pair

LOOKAHEAD = 1024  # calls after the difference that are searched
CONTEXT_MAX = 8  # preceding calls that must repeat for the past to predict the next one
FIT_MIN = 0.9  # share of calls that must fit after the move
TRIES_MAX = 64  # places where the first call fits; beyond that the calls are all alike


@dataclass(frozen=True, slots=True)
class Shift:
    """`calls` above 0: that many were left out; below 0: put in; 0: changed in place."""

    calls: int
    fits: int  # how many calls speak for it


def find_shift(
    wrong: Sequence[Pair], right: Sequence[Pair], future: Sequence[Pair], *, has_more: bool
) -> Shift:
    """How `wrong`, which starts at the difference, is moved against `right`, which starts there
    too and is expected to go on with `future`. `has_more`: it made more calls than the others,
    which decides between a call left out and one put in where both would fit."""
    expected = [*right, *future][:LOOKAHEAD]
    left_out = _first_fit(expected, wrong)
    put_in = _first_fit(wrong, expected)
    candidates = [
        Shift(0, _fits(wrong, expected)),
        *(Shift(calls, fits) for calls, fits in left_out),
        *(Shift(-calls, fits) for calls, fits in put_in),
    ]
    return max(
        candidates,
        key=lambda s: (s.fits, s.calls == 0, -abs(s.calls), (s.calls < 0) == has_more),
    )


def _first_fit(longer: Sequence[Pair], other: Sequence[Pair]) -> Iterator[tuple[int, int]]:
    """By how many calls `longer` must be moved so that it fits `other`, and how many fit."""
    places = (at for at in range(1, len(longer)) if longer[at] == other[0])
    for _, at in zip(range(TRIES_MAX), places, strict=False):
        size = min(len(longer) - at, len(other))
        fits = _fits(longer[at:], other)
        if fits >= FIT_MIN * size:
            yield at, fits
            return


def _fits(one: Sequence[Pair], other: Sequence[Pair]) -> int:
    return sum(1 for x, y in zip(one, other, strict=False) if x == y)


def predict(past: Sequence[Pair], length: int = LOOKAHEAD) -> list[Pair]:
    """What follows `past` if it repeats itself: what came after the latest earlier stretch that
    ends in the same calls, the longest such stretch first. Empty when nothing repeats."""
    size = len(past)
    for context in range(min(CONTEXT_MAX, size - 1), 0, -1):
        tail = list(past[size - context :])
        for end in range(size - 1, context - 1, -1):
            if past[end - 1] == tail[-1] and list(past[end - context : end]) == tail:
                return list(past[end : end + length])
    return []
