"""Other forms in which the same dumps may come: each keeps the truth, or takes evidence away."""

import copy
import json
import pickle
import re

from flightrec.plainpickle import read_plain


def load(folder):
    """The dumps of a folder as plain values, by rank."""
    files = sorted((folder / "dumps").iterdir())
    return {int(re.findall(r"\d+", file.name)[-1]): plain(file.read_bytes()) for file in files}


def plain(data):
    entries = []
    top = read_plain(data, entries.append)
    return {**top, "entries": entries}


def written(dumps, folder, name="nccl_trace_rank_{}", how=pickle.dumps):
    folder.mkdir(parents=True)
    for rank, dump in dumps.items():
        path = folder / name.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = how(dump)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def each(dumps, change):
    """Every dump after `change(dump, rank)` on a copy of it."""
    copies = copy.deepcopy(dumps)
    for rank, dump in copies.items():
        change(dump, rank)
    return copies


def as_torch_2_4(dump, rank):
    """Version 2.1: neither status nor time limits nor threads."""
    dump["version"] = "2.1"
    dump.pop("pg_status", None)
    dump.pop("comm_lib_version", None)
    for entry in dump["entries"]:
        for key in ("timeout_ms", "thread_id", "thread_name"):
            entry.pop(key, None)


def as_torch_2_6(dump, rank):
    dump["version"] = "2.5"
    dump["nccl_version"] = dump.pop("comm_lib_version", "2.21.5")
    for entry in dump["entries"]:
        entry.pop("thread_id", None)
        entry.pop("thread_name", None)


def of_mixed_versions(dump, rank):
    (as_torch_2_4 if rank % 2 else as_torch_2_6)(dump, rank)


def with_unknown_fields(dump, rank):
    dump["from_the_future"] = {"a": [1, {"b": None}]}
    for entry in dump["entries"]:
        entry["split_sizes"] = [[1, 2], []]
        entry["channel"] = "x"


def with_numbers_as_text(dump, rank):
    """As JSON writers do it: status and sequence numbers as strings, names as lists."""
    for status in dump.get("pg_status", {}).values():
        status.update({key: str(value) for key, value in status.items()})
    for entry in dump["entries"]:
        for key in ("collective_seq_id", "p2p_seq_id", "op_id"):
            entry[key] = str(entry[key])
        entry["process_group"] = list(entry["process_group"])


def of_another_library(dump, rank):
    for entry in dump["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "nccl2:")


def without_stacks(dump, rank):
    for entry in dump["entries"]:
        entry.pop("frames", None)


def without_timing(dump, rank):
    for entry in dump["entries"]:
        entry.pop("duration_ms", None)
        if entry["state"] == "started":
            entry["state"] = "scheduled"


def only_active(dump, rank):
    """As with TORCH_INCLUDE_ONLY_ACTIVE: what has completed is not written."""
    dump["entries"] = [entry for entry in dump["entries"] if entry["state"] != "completed"]


def wrapped(share):
    """The ring was smaller: each rank has lost a little more of its past than the one before."""

    def change(dump, rank):
        entries = dump["entries"]
        lost = min(int(len(entries) * share) + rank % 3, max(0, len(entries) - 4))
        dump["entries"] = entries[lost:]

    return change


def shifted(dump, rank):
    """The job was much older: all numbers are large."""
    for entry in dump["entries"]:
        entry["record_id"] += 1_000_000 + 17 * rank
        for key in ("collective_seq_id", "op_id"):
            entry[key] += 70_000
        if entry["p2p_seq_id"]:
            entry["p2p_seq_id"] += 70_000
    for status in dump.get("pg_status", {}).values():
        for key in status:
            status[key] += 70_000 if status[key] >= 0 else 0


def to_json(dump):
    return json.dumps(dump)


SAME_TRUTH = {
    "torch 2.4": as_torch_2_4,
    "torch 2.6": as_torch_2_6,
    "mixed versions": of_mixed_versions,
    "unknown fields": with_unknown_fields,
    "numbers as text": with_numbers_as_text,
    "another library": of_another_library,
    "an old job": shifted,
}
LESS_EVIDENCE = {
    "no stacks": without_stacks,
    "no timing": without_timing,
    "only active": only_active,
    "wrapped by a fifth": wrapped(0.2),
    "wrapped by half": wrapped(0.5),
}
NAMES = {
    "hosts": "host7.pci3_rank_{}",
    "nvrx": "_dump_{}",
    "suffix": "trace_rank_{}.pkl",
    "torchft": "fr_quorum_4/{}",
    "hcom": "job12/nccl_trace_rank_{}",
}
