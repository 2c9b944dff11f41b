"""Find the rank for which all others wait at every call, when nothing hangs.

The straggler is the one with the short durations: the others start the call early and wait inside
it. Durations need TORCH_NCCL_ENABLE_TIMING=1. Where calls block the host (gloo) the times at which
they were made tell too; with NCCL they do not, for hosts run ahead of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from flightrec.lanes import RETIRED_MEANS_ENDED, Lane
from flightrec.model import Kind
from flightrec.suspects import Case, Suspect

CALLS_MIN = 5  # fewer late calls are no habit
RATIO_MIN = 5.0  # the others' durations over the straggler's
WAIT_MIN_MS = 50.0  # waiting that is worth a sentence
SHARE_MIN = 0.6  # of the calls in which the rank must be late
RECENT = 64  # calls at the end of each lane that are looked at


def straggler_suspects(case: Case) -> list[Suspect]:
    """The rank that is late at most calls of a group, in the group where it costs most."""
    found = []
    for group, of_rank in case.lanes.of.items():
        if len(of_rank) > 2:
            late = _by_duration(case, of_rank) or _by_arrival(case, of_rank)
            if late is not None:
                found.append((late[1], group, *late))
    if not found:
        return []
    _, group, rank, wait_ms, calls, how = max(found)
    lane = case.lanes.of[group][rank]
    return [
        Suspect(
            rank=rank,
            kind=Kind.STRAGGLER,
            group=group,
            seq=lane.seq[-1],
            call=lane.call[-1],
            site=lane.site[-1],
            confidence=0.9 if how == "durations" else 0.7,
            because=(
                f"the others wait {wait_ms:.0f} ms for it in a typical call ({calls} calls, by "
                f"their {how})",
            ),
            is_hanging=False,
        )
    ]


def _by_duration(case: Case, of_rank: Mapping[int, Lane]) -> tuple[int, float, int, str] | None:
    by_seq: dict[int, dict[int, float]] = {}
    for rank, lane in of_rank.items():
        columns = case.records.ranks[rank].columns
        if columns is None or not columns.duration_ms:
            return None
        for seq, at in zip(lane.seq[-RECENT:], lane.at[-RECENT:], strict=True):
            if columns.duration_ms[at] >= 0:
                by_seq.setdefault(seq, {})[rank] = columns.duration_ms[at]
    return _late_one(by_seq, len(of_rank), "durations")


def _late_one(
    by_seq: Mapping[int, Mapping[int, float]], members: int, how: str
) -> tuple[int, float, int, str] | None:
    """The one rank whose value is far below all others in most calls."""
    waits: dict[int, list[float]] = {}
    calls = 0
    for values in by_seq.values():
        if len(values) < members:
            continue
        calls += 1
        ordered = sorted(values, key=lambda rank: (values[rank], rank))
        shortest, others = values[ordered[0]], [values[rank] for rank in ordered[1:]]
        usual = median(others)
        if usual - shortest >= WAIT_MIN_MS and others[0] >= RATIO_MIN * max(shortest, 1e-3):
            waits.setdefault(ordered[0], []).append(usual - shortest)
    rank = max(waits, key=lambda r: (len(waits[r]), -r), default=None)
    if rank is None or len(waits[rank]) < max(CALLS_MIN, SHARE_MIN * calls):
        return None
    return rank, median(waits[rank]), len(waits[rank]), how


def _by_arrival(case: Case, of_rank: Mapping[int, Lane]) -> tuple[int, float, int, str] | None:
    """Lateness of each call against the first of the members, as if it were time left to wait.

    The first calls come right after a rendezvous, so the lateness there is the error of the clocks.
    """
    made: dict[int, dict[int, float]] = {}
    for rank, lane in of_rank.items():
        columns = case.records.ranks[rank].columns
        if columns is None or case.records.ranks[rank].library not in RETIRED_MEANS_ENDED:
            return None
        for seq, at in zip(lane.seq[-RECENT:], lane.at[-RECENT:], strict=True):
            made.setdefault(seq, {})[rank] = columns.created_ns[at] / 1e6
    whole = {seq: times for seq, times in made.items() if len(times) == len(of_rank)}
    if not whole:
        return None
    offset = _clock_offsets(whole[min(whole)])
    left: dict[int, dict[int, float]] = {}
    for seq, times in whole.items():
        lateness = {rank: at - offset[rank] for rank, at in times.items()}
        latest = max(lateness.values())
        left[seq] = {rank: latest - at for rank, at in lateness.items()}
    return _late_one(left, len(of_rank), "times of arrival")


def _clock_offsets(first: Mapping[int, float]) -> dict[int, float]:
    middle = median(first.values())
    return {rank: at - middle for rank, at in first.items()}
