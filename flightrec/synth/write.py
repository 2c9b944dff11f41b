"""Write what the ranks of a made-up job recorded as dumps, in the recorder's own format."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

from flightrec.synth.job import Job, MadeGroup, Op
from flightrec.synth.world import Fault, Issued, Outcome, run

START_NS = 1_750_000_000_000_000_000
FILE = "/srv/demo/train.py"


def synthesize(
    job: Job,
    faults: Sequence[Fault] = (),
    *,
    run_ahead: int = 8,
    seed: int = 0,
    ring: int = 2000,
    with_stacks: bool = True,
    with_timing: bool = False,
) -> dict[int, dict[str, object]]:
    """The dump of each rank that left one, as plain data. The same arguments, the same dumps."""
    outcome = run(job, faults, run_ahead=run_ahead, seed=seed)
    groups = job.groups()
    return {
        rank: _dump(rank, outcome, groups, ring, with_stacks, with_timing)
        for rank in outcome.calls
        if rank not in outcome.dead
    }


def write_dumps(
    folder: str, dumps: Mapping[int, Mapping[str, object]], *, as_json: bool = False
) -> None:
    """Write one file a rank, named as the recorder names them."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for rank, dump in sorted(dumps.items()):
        if as_json:
            (target / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
        else:
            (target / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=4))


def _dump(
    rank: int,
    outcome: Outcome,
    groups: Sequence[MadeGroup],
    ring: int,
    with_stacks: bool,
    with_timing: bool,
) -> dict[str, object]:
    mine = [(i, g) for i, g in enumerate(groups) if rank in g.ranks]
    pg_ids = {index: number for number, (index, _) in enumerate(mine)}
    entries = []
    for index, call in enumerate(_with_closings(outcome.calls[rank])):
        entry = _entry(index, call, rank, groups, pg_ids, outcome, with_timing)
        if with_stacks:
            entry["frames"] = _frames(call.op)
        entries.append(entry)
    return {
        "version": "2.10",
        "comm_lib_version": "2.28.9",
        "pg_config": {
            g.name: {"name": g.name, "desc": g.desc, "ranks": str(list(g.ranks))} for _, g in mine
        },
        "pg_status": {
            str(pg_ids[i]): _status([c for c in outcome.calls[rank] if c.op.group == i])
            for i, _ in mine
        },
        "entries": entries[-ring:],
    }


def _with_closings(calls: Sequence[Issued]) -> list[Issued]:
    """Behind each batch of sends and receives comes the entry that carries its state."""
    found: list[Issued] = []
    for index, call in enumerate(calls):
        found.append(call)
        after = calls[index + 1] if index + 1 < len(calls) else None
        if call.op.batch and (after is None or after.op.batch != call.op.batch):
            batch = [c for c in calls if c.p2p_seq == call.p2p_seq and c.op.batch == call.op.batch]
            batch = [c for c in batch if c.op.group == call.op.group]
            op = Op(group=call.op.group, op="coalesced", numel=0, line=call.op.line)
            closing = Issued(op, call.seq, call.p2p_seq, call.op_id, call.at_ms)
            closing.is_done = all(c.is_done for c in batch)
            closing.done_ms = call.done_ms
            found.append(closing)
    return found


def _status(calls: Sequence[Issued]) -> dict[str, int]:
    return {
        "last_enqueued_collective": max((c.seq for c in calls), default=-1),
        "last_started_collective": -1,
        "last_completed_collective": max((c.seq for c in calls if c.is_done), default=-1),
    }


def _entry(
    index: int,
    call: Issued,
    rank: int,
    groups: Sequence[MadeGroup],
    pg_ids: Mapping[int, int],
    outcome: Outcome,
    with_timing: bool,
) -> dict[str, object]:
    op, group = call.op, groups[call.op.group]
    is_batched = bool(op.batch)
    is_done = call.is_done and not is_batched
    state = "completed" if is_done else "scheduled"
    if with_timing and call.is_started and not is_done:
        state = "started"
    created = START_NS + int(call.at_ms * 1e6)
    entry: dict[str, object] = {
        "record_id": index,
        "pg_id": pg_ids[op.group],
        "process_group": (group.name, group.desc),
        "collective_seq_id": call.seq,
        "p2p_seq_id": call.p2p_seq,
        "op_id": call.op_id,
        "profiling_name": _name(op, rank, group),
        "time_created_ns": created,
        **_sizes(op, rank, len(group.ranks)),
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + 1_000_000 if is_done else None,
        "retired": is_done,
        "timeout_ms": 600000,
        "is_p2p": op.peer is not None,
        "thread_id": "1",
        "thread_name": "python3",
    }
    if with_timing and is_done:
        entry["duration_ms"] = 5.0 if rank in outcome.slow or not outcome.slow else 405.0
    return entry


def _name(op: Op, rank: int, group: MadeGroup) -> str:
    if op.peer is None:
        return f"nccl:{op.op}"
    own, peer = group.ranks.index(rank), group.ranks.index(op.peer)
    return f"nccl:send {own}->{peer}" if op.op == "send" else f"nccl:recv {own}<-{peer}"


def _sizes(op: Op, rank: int, members: int) -> dict[str, object]:
    ins, outs = [[op.numel]], [[op.numel]]
    if op.op == "_all_gather_base":
        outs = [[op.numel * members]]
    elif op.op == "gather":
        outs = [[op.numel] for _ in range(members)] if rank == op.root else [[0]]
    elif op.op == "coalesced":
        ins, outs = [], []
    return {
        "input_sizes": ins,
        "input_dtypes": [op.dtype] * len(ins),
        "output_sizes": outs,
        "output_dtypes": [op.dtype] * len(outs),
    }


_FRAMES: dict[int, list[dict[str, object]]] = {}


def _frames(op: Op) -> list[dict[str, object]]:
    """The stack of a call; one list for each source line, as the recorder shares them."""
    if op.line not in _FRAMES:
        _FRAMES[op.line] = [
            {"name": op.op, "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 3068},
            {"name": "train_step", "filename": FILE, "line": op.line},
            {"name": "main", "filename": FILE, "line": 12},
        ]
    return _FRAMES[op.line]
