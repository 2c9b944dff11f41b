"""Small dumps on disk, in the recorder's own form, for tests of what reads them again."""

import pickle

import flightrec

FRAMES = [
    {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 3},
    {"name": "train_secret_model", "filename": "/home/alice/secret/train.py", "line": 41},
]


def entry(record, seq, *, op="all_reduce", state="completed", size=8, line=41, group="default_pg"):
    frames = [FRAMES[0], {**FRAMES[1], "line": line}]
    return {
        "frames": frames,
        "record_id": record,
        "pg_id": 0,
        "process_group": ("0", group),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_700_000_123_000_000_000 + seq * 10**9,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 7000,
        "is_p2p": False,
        "thread_name": "alice_worker",
        "thread_id": "7",
    }


def write_dump(folder, rank, entries, *, world=2, group="default_pg"):
    folder.mkdir(parents=True, exist_ok=True)
    top = {
        "version": "2.10",
        "comm_lib_version": "2.28.9",
        "pg_config": {"0": {"name": "0", "desc": group, "ranks": str(list(range(world)))}},
        "pg_status": {},
        "entries": entries,
        "host_of_alice": "secret-host",
    }
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(top, protocol=2))


def small_dumps(folder, *, group="default_pg"):
    """Rank 1 never issues call 2."""
    write_dump(
        folder,
        0,
        [entry(0, 1, group=group), entry(1, 2, state="scheduled", group=group)],
        group=group,
    )
    write_dump(folder, 1, [entry(0, 1, group=group)], group=group)
    return folder


def small_job(folder):
    return flightrec.load([str(small_dumps(folder / "dumps"))])
