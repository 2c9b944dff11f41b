"""Run a made-up job: hosts issue calls ahead of their devices, devices meet in collectives.

Each device works its calls off in order. A collective ends when it is the oldest open call of all
members; a send and a receive end when both are the oldest. Whatever a fault prevents stays open,
and so does everything behind it: the hang is not drawn, it happens.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flightrec.model import Kind
from flightrec.synth.job import Job, Op

HANGING = (
    Kind.NEVER_ISSUED,
    Kind.DIED,
    Kind.WRONG_OP,
    Kind.SIZE_MISMATCH,
    Kind.DTYPE_MISMATCH,
    Kind.ORDER_INVERSION,
    Kind.SKIPPED_CALL,
    Kind.EXTRA_CALL,
    Kind.DEVICE_STALL,
    Kind.P2P_NO_PARTNER,
    Kind.UNEVEN_INPUTS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What one rank does wrong, in which step and at which of its calls there."""

    rank: int
    kind: Kind
    step: int = 1
    at: int = 0
    is_silent: bool = False  # a mismatch that completes, as NCCL does when the bytes suffice


@dataclass(slots=True)
class Issued:
    """A call that a host made, as the recorder keeps it."""

    op: Op
    seq: int
    p2p_seq: int
    op_id: int
    at_ms: float
    is_done: bool = False
    is_started: bool = False
    done_ms: float | None = None


@dataclass(slots=True)
class _Rank:
    program: list[Op]
    stop: int | None = None  # the host never makes the call at this index
    stall: int | None = None  # the device never takes up the call at this index
    cursor: int = 0
    head: int = 0
    calls: list[Issued] = field(default_factory=list)
    seqs: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    p2p_seqs: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    op_ids: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    batch: int = 0
    is_dead: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What every rank recorded, and which of them left no dump."""

    calls: Mapping[int, list[Issued]]
    dead: frozenset[int]
    slow: Mapping[int, float]  # rank -> ms by which it is late at every call
    is_hanging: bool


def run(job: Job, faults: Sequence[Fault] = (), *, run_ahead: int = 8, seed: int = 0) -> Outcome:
    """Run until nothing moves any more. `run_ahead`: calls a host makes beyond its device."""
    rng = random.Random(seed)
    groups = job.groups()
    ranks = {rank: _Rank(_flat(job, rank)) for rank in range(job.layout.world)}
    slow = {}
    for fault in faults:
        _inject(job, ranks[fault.rank], fault)
        if fault.kind is Kind.STRAGGLER:
            slow[fault.rank] = 400.0
    silent = {f.rank for f in faults if f.is_silent}
    now = 0.0
    moved = True
    while moved:
        moved = False
        order = sorted(ranks)
        rng.shuffle(order)
        for rank in order:
            now += 0.01
            moved = _issue(ranks[rank], run_ahead, now) or moved
            moved = _finish(ranks, rank, groups_of=groups, silent=silent, now=now) or moved
    dead = frozenset(f.rank for f in faults if f.kind is Kind.DIED)
    calls = {rank: state.calls for rank, state in ranks.items()}
    is_hanging = any(state.head < len(state.program) for state in ranks.values())
    return Outcome(calls, dead, slow, is_hanging)


def _flat(job: Job, rank: int) -> list[Op]:
    steps = job.program(rank)
    return [op for step in steps for op in step] + job.ending()


def _inject(job: Job, state: _Rank, fault: Fault) -> None:
    """Change the program of one rank, or where its host or device stops."""
    program = state.program
    size = (len(program) - 1) // job.steps
    at = min(fault.step * size + fault.at % size, len(program) - 2)
    match fault.kind:
        case Kind.NEVER_ISSUED:
            state.stop = at
        case Kind.DIED:
            state.stop, state.is_dead = at, True
        case Kind.DEVICE_STALL:
            state.stall = at
        case Kind.WRONG_OP:
            at = _next_collective(program, at)
            program[at] = replace(program[at], op="broadcast", line=777)
        case Kind.SIZE_MISMATCH:
            at = _next_collective(program, at)
            program[at] = replace(program[at], numel=program[at].numel * 2 + 1)
        case Kind.DTYPE_MISMATCH:
            at = _next_collective(program, at)
            program[at] = replace(program[at], dtype="BFloat16")
        case Kind.SKIPPED_CALL:
            del program[_next_collective(program, at)]
        case Kind.EXTRA_CALL:
            at = _next_collective(program, at)
            program.insert(at, replace(program[at], line=778))
        case Kind.ORDER_INVERSION:
            at = _next_border(program, at)
            program[at], program[at + 1] = program[at + 1], program[at]
        case Kind.P2P_NO_PARTNER:
            del program[_next_p2p(program, at)]
        case Kind.UNEVEN_INPUTS:
            del program[fault.step * size : (fault.step + 1) * size]


def _next_p2p(program: Sequence[Op], at: int) -> int:
    return next((i for i in range(at, len(program)) if program[i].peer is not None), at)


def _next_collective(program: Sequence[Op], at: int) -> int:
    """The next collective of a group of fixed sizes: an all_to_all may differ by right."""
    fits = (i for i in range(at, len(program)) if program[i].peer is None)
    return next((i for i in fits if program[i].op not in ("all_to_all", "gather")), at)


def _next_border(program: Sequence[Op], at: int) -> int:
    """The next place where two collectives of different groups follow each other."""
    for i in range(at, len(program) - 1):
        one, other = program[i], program[i + 1]
        if one.group != other.group and one.peer is None and other.peer is None:
            return i
    return at


def _issue(state: _Rank, run_ahead: int, now: float) -> bool:
    """The host makes its next call, unless it is stuck, done or too far ahead."""
    if state.cursor >= len(state.program) or state.cursor == state.stop:
        return False
    if state.cursor - state.head > run_ahead:
        return False
    op = state.program[state.cursor]
    group = op.group
    state.op_ids[group] += 1
    if op.peer is None:
        state.seqs[group] += 1
    elif not op.batch or op.batch != state.batch:
        state.p2p_seqs[group] += 1
    state.batch = op.batch if op.peer is not None else 0
    state.calls.append(
        Issued(op, state.seqs[group], state.p2p_seqs[group], state.op_ids[group], now)
    )
    state.cursor += 1
    return True


def _finish(
    ranks: Mapping[int, _Rank],
    rank: int,
    *,
    groups_of: Sequence[object],
    silent: set[int],
    now: float,
) -> bool:
    """The device works off its oldest call, when all others stand at theirs."""
    state = ranks[rank]
    call = _head(state)
    if call is None:
        return False
    members = getattr(groups_of[call.op.group], "ranks", ())
    partners = members if call.op.peer is None else (rank, call.op.peer)
    heads = {member: _head(ranks[member]) for member in partners}
    call.is_started = state.stall != state.head
    if any(head is None for head in heads.values()):
        return False
    met = [head for head in heads.values() if head is not None]
    if not _is_one(call, met, bool(silent)) or any(_is_held(ranks[m]) for m in partners):
        return False
    for member in partners:
        head = _head(ranks[member])
        assert head is not None
        head.is_done, head.done_ms = True, now
        ranks[member].head += 1
    return True


def _head(state: _Rank) -> Issued | None:
    """The oldest open call of a device. A dead process takes its device's work along."""
    if state.is_dead and state.cursor == state.stop:
        return None
    return state.calls[state.head] if state.head < len(state.calls) else None


def _is_held(state: _Rank) -> bool:
    return state.stall is not None and state.head >= state.stall


def _is_one(call: Issued, met: Sequence[Issued], is_silent: bool) -> bool:
    if call.op.peer is not None:
        other = next(m for m in met if m is not call)
        return other.op.peer is not None and other.op.op != call.op.op
    same_place = all(m.op.group == call.op.group and m.seq == call.seq for m in met)
    return same_place and (is_silent or len({m.op.key for m in met}) == 1)
