"""Find the first call in which lanes of one group differ, at the speed of memcmp."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise

from flightrec.lanes import Lane

Pair = tuple[int, int]  # token and site of one call; site 0 where stacks are not compared


def first_difference(lanes: Iterable[Lane], *, after: int, with_sites: bool) -> int | None:
    """The lowest sequence number above `after` at which lanes differ.

    Each lane is compared with its neighbour by age, so that lanes whose rings hold different
    stretches still meet; equality passes along the chain.
    """
    ordered = sorted(lanes, key=lambda lane: (lane.seq[0], lane.seq[-1], lane.rank))
    found = (
        _differs(one, other, after=after, with_sites=with_sites) for one, other in pairwise(ordered)
    )
    return min((seq for seq in found if seq is not None), default=None)


def pair_at(lane: Lane, seq: int) -> Pair | None:
    """Token and site of the lane's call at `seq`, or None when it does not show one."""
    at = lane.position(seq)
    return None if at is None else (lane.token[at], lane.site[at])


def pairs_of(lane: Lane, start: int, stop: int) -> list[Pair]:
    """Tokens and sites of a stretch of positions."""
    return list(zip(lane.token[start:stop], lane.site[start:stop], strict=True))


def _differs(one: Lane, other: Lane, *, after: int, with_sites: bool) -> int | None:
    low = max(one.seq[0], other.seq[0], after + 1)
    high = min(one.seq[-1], other.seq[-1])
    with_sites = with_sites and one.has_sites and other.has_sites
    if low > high:
        return None
    if not (one.is_contiguous and other.is_contiguous):
        return _differs_sparsely(one, other, low, high, with_sites)
    a, b, size = low - one.seq[0], low - other.seq[0], high - low + 1
    at = _unequal_at(one.token[a : a + size], other.token[b : b + size])
    if with_sites:
        by_site = _unequal_at(one.site[a : a + size], other.site[b : b + size])
        at = min((x for x in (at, by_site) if x is not None), default=None)
    return None if at is None else low + at


def _unequal_at(left: array[int], right: array[int]) -> int | None:
    """Index of the first unequal element, by bisection."""
    if left == right:
        return None
    low, high = 0, len(left)  # the first difference lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle].tobytes() == right[low:middle].tobytes():
            low = middle
        else:
            high = middle
    return low


def _differs_sparsely(one: Lane, other: Lane, low: int, high: int, with_sites: bool) -> int | None:
    mine, theirs = _by_seq(one, with_sites), _by_seq(other, with_sites)
    common = (seq for seq in mine.keys() & theirs.keys() if low <= seq <= high)
    return min((seq for seq in common if mine[seq] != theirs[seq]), default=None)


def _by_seq(lane: Lane, with_sites: bool) -> dict[int, Pair]:
    sites = lane.site if with_sites else [0] * len(lane.seq)
    return dict(zip(lane.seq, zip(lane.token, sites, strict=True), strict=True))
