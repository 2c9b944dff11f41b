"""Dumps are found wherever they lie, and bad ones are told, never fatal."""

import gzip
import json
import pickle
import tarfile
import zipfile

import pytest

import flightrec
from flightrec.annotate import annotated
from flightrec.dump import read_dump
from flightrec.errors import NoDumps
from flightrec.loading import load_paths
from flightrec.model import Kind, Verdict
from flightrec.sources import Source
from flightrec.synth import Fault, Job, Layout, synthesize, write_dumps

JOB = Job(layout=Layout(dp=4))
DUMPS = synthesize(JOB, [Fault(rank=2, kind=Kind.NEVER_ISSUED, step=2)])


@pytest.fixture
def folder(tmp_path):
    write_dumps(str(tmp_path / "dumps"), DUMPS)
    return tmp_path / "dumps"


def culprits(*paths, **options):
    return [
        c.rank for c in flightrec.analyze(flightrec.load(list(map(str, paths)), **options)).culprits
    ]


def test_folder_files_and_glob_are_the_same(folder):
    assert culprits(folder) == culprits(*folder.iterdir()) == culprits(folder / "nccl*") == [2]


def test_archives_and_compressed_files(folder, tmp_path):
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as tar:
        tar.add(folder, "job/dumps")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"job/{path.name}")
    (tmp_path / "packed").mkdir()
    for path in folder.iterdir():
        (tmp_path / "packed" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert culprits(tmp_path / "all.tar.gz") == culprits(tmp_path / "all.zip") == [2]
    assert culprits(tmp_path / "packed") == [2]


def test_object_stores_by_url(folder):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({f"/job/{path.name}": path.read_bytes() for path in folder.iterdir()})
    assert culprits("memory://job") == culprits("memory://job/nccl*") == [2]
    memory.rm("/job", recursive=True)


def test_json_and_pickle_and_versions_mix(folder):
    (folder / "nccl_trace_rank_1").unlink()
    old = json.loads(json.dumps(DUMPS[1]))
    old["version"] = "2.4"
    del old["pg_status"]
    (folder / "host7.pci3_rank_1.json").write_text(json.dumps(old))
    assert culprits(folder) == [2]


def test_a_torn_an_empty_and_a_foreign_file_are_told(folder):
    whole = (folder / "nccl_trace_rank_0").read_bytes()
    (folder / "nccl_trace_rank_0").write_bytes(whole[: len(whole) * 3 // 4])
    (folder / "nccl_trace_rank_3").write_bytes(b"")
    (folder / "notes.json").write_text("[1]")
    records = flightrec.load([str(folder)])
    told = " ".join(p.what for p in records.problems)
    assert "ends early" in told and "neither a pickle" in told and "not a flight" in told
    assert 3 in records.missing_ranks


def test_of_two_dumps_of_a_rank_the_later_one_counts(folder, tmp_path):
    stale = pickle.loads(pickle.dumps(DUMPS[0]))
    stale["entries"] = stale["entries"][:2]
    write_dumps(str(tmp_path / "before"), {0: stale})
    records = flightrec.load([str(tmp_path)])
    assert "a second dump of rank 0" in records.problems[0].what
    assert culprits(tmp_path) == [2]


def test_the_newest_quorum_is_read_unless_asked_otherwise(tmp_path):
    write_dumps(str(tmp_path / "job_quorum_3"), synthesize(JOB))
    write_dumps(str(tmp_path / "job_quorum_12"), DUMPS)
    records = flightrec.load([str(tmp_path)])
    assert records.quorum == 12 and "also there: 3" in records.problems[0].what
    assert culprits(tmp_path) == [2] and culprits(tmp_path, quorum=3) == []
    with pytest.raises(NoDumps, match="no folder of quorum 7"):
        flightrec.load([str(tmp_path)], quorum=7)


def test_replica_groups_that_number_their_ranks_from_zero(tmp_path):
    for replica in (0, 1):
        faults = [Fault(rank=1, kind=Kind.NEVER_ISSUED, step=2)] if replica else []
        dumps = synthesize(Job(layout=Layout(dp=2)), faults)
        write_dumps(str(tmp_path / "job_quorum_1"), {2 * replica + r: d for r, d in dumps.items()})
    assert culprits(tmp_path) == [3]


@pytest.mark.parametrize("content", [None, b"", b"\x80\x02garbage", b"{}", b"hello"])
def test_without_any_dump_the_error_says_what_to_do(tmp_path, content):
    if content is not None:
        (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    with pytest.raises(NoDumps) as failure:
        flightrec.load([str(tmp_path)])
    assert "TORCH_FR_DUMP_TEMP_FILE" in failure.value.remedy


@pytest.mark.parametrize(
    "name, rank",
    [
        ("a/nccl_trace_rank_3", 3),
        ("a/comm_lib_trace_rank_12.json", 12),
        ("host.pci3_rank_7", 7),
        ("x_dump_5.json", 5),
        ("job_quorum_9/4", 4),
        ("nccl_trace_rank_2.pkl.gz", 2),
        ("notes", None),
    ],
)
def test_ranks_from_names(name, rank):
    assert Source(name).rank == rank


def test_children_read_what_this_process_reads(folder, monkeypatch):
    here = load_paths([str(folder)])
    monkeypatch.setattr("flightrec.loading.SMALL_BYTES", 0)
    assert load_paths([str(folder)], processes=2) == here


def test_whole_entries_can_be_read_again(folder):
    records = flightrec.load([str(folder)])
    entries = list(records.entries(0))
    assert [e.record_id for e in entries] == list(range(len(DUMPS[0]["entries"])))
    assert entries[0].site[1].name == "train_step"


def test_the_report_is_plain_json(folder):
    report = flightrec.analyze(flightrec.load([str(folder)]))
    value = json.loads(json.dumps(report.to_json()))
    assert value["verdict"] == Verdict.FAULT
    needed = {"rank", "kind", "group", "seq", "op", "where", "confidence", "because"}
    assert needed <= set(value["culprits"][0])
    assert [c["rank"] for c in value["consequences"]] == [0, 1, 3]


def test_an_annotated_dump_tells_its_rank_and_which_groups_live(tmp_path):
    made = synthesize(Job(layout=Layout(dp=2)), seed=1)
    for rank, dump in made.items():
        data = pickle.dumps(dump, protocol=2)
        live = {"default_pg": {"0": [4, 5]}}
        told = annotated(data, rank=rank + 4, host=f"h{rank}", live_groups=live)
        (tmp_path / f"x{rank}").write_bytes(told)
    records = flightrec.load([str(tmp_path / "x0"), str(tmp_path / "x1")])
    assert {r.host for r in records.ranks.values()} == {"h0", "h1"}
    assert (4, 5) in [group.ranks for group in records.groups]


def test_calls_of_a_group_whose_like_lives_on_are_left_out(tmp_path):
    (dump, _) = synthesize(Job(layout=Layout(dp=2, tp=1)), seed=1).values()
    live = {"dp": {"of another quorum": [0, 1]}}
    before, after = (
        read_dump(data).columns
        for data in (
            pickle.dumps(dump, protocol=2),
            annotated(pickle.dumps(dump, protocol=2), rank=0, live_groups=live),
        )
    )
    assert 0 < len(after) < len(before)


@pytest.mark.parametrize("data", [b"", b"\x80\x02}(", b"not a dump"])
def test_what_is_no_whole_dump_is_not_annotated(data):
    assert annotated(data, rank=1, live_groups={}) == data


def test_a_wrong_name_is_overruled_by_the_rank_s_own_sends(tmp_path):
    made = synthesize(Job(layout=Layout(dp=1, pp=2)), seed=1)
    for dump in made.values():
        entries = [e for e in dump["entries"] if e["process_group"][1] == "pp"]
        for entry in entries:
            entry["process_group"] = ("0", "default_pg")
    for rank, dump in made.items():
        (tmp_path / f"rank_{1 - rank}").write_bytes(pickle.dumps(dump))
    records = flightrec.load([str(tmp_path)])
    assert {r: record.source[-1] for r, record in records.ranks.items()} == {0: "1", 1: "0"}
    assert "says rank 0" in records.problems[0].what
