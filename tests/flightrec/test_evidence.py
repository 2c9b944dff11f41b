"""Evidence beside the dumps: exit codes, and sorting files by their content."""

import gzip
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner

from flightrec.__main__ import main
from flightrec.errors import BadEvidence
from flightrec.evidence import collect
from flightrec.exits import read_exits
from flightrec.unpacking import unpack
from tests.flightrec import real


def lay_out(folder, name):
    one = real.real_sets()[name]
    for file, text in {**one["logs"], **one["ras"]}.items():
        (folder / file).write_text(text)
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps({"version": "2.10"}, protocol=2))
    (folder / "notes.md").write_text("nothing")
    return folder


def test_a_folder_is_sorted_by_content_and_dumps_are_left_to_the_loader(tmp_path):
    found = collect([str(lay_out(tmp_path, "kill9_ras"))])
    assert sorted(found.book.ranks) == [0, 1, 2, 3]
    assert [s.rank for s in found.evidence.ras if s.is_missing] == [2, 3]
    assert not any("nccl_trace" in file or "notes" in file for file in found.files)


def test_a_compressed_log_is_read(tmp_path):
    text = real.real_sets()["exception_exit"]["logs"]["rank1.log"]
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(text.encode()))
    found = collect([], logs=[str(tmp_path)])
    (end,) = found.evidence.exits
    assert (end.rank, end.is_first_cause, end.error) == (1, True, "ValueError: loss is nan")


def test_a_named_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(BadEvidence, match="does not exist"):
        collect([], ras=[str(tmp_path / "no.txt")])


def test_ends_of_real_processes_show_the_first_that_nobody_ordered():
    ends = real.real_sets()["kill9_ras"]["exit"]
    first = [e for e in read_exits(json.dumps(ends)) if e.is_first_cause]
    assert [(e.rank, e.signal) for e in first] == [(2, "SIGKILL")]


def test_aborts_by_the_watchdog_are_no_first_cause():
    ends = real.real_sets()["buffer_wrap"]["exit"]
    assert not any(e.is_first_cause for e in read_exits(json.dumps(ends)))


def test_plain_lines_are_understood():
    exits = read_exits("rank 0: exit 1\n1 -9\nrank 2: SIGSEGV\n3: running\n")
    assert [(e.rank, e.code, e.signal) for e in exits] == [
        (0, 1, ""),
        (1, -9, "SIGKILL"),
        (2, -11, "SIGSEGV"),
        (3, None, ""),
    ]


def test_broken_json_is_one_clear_error():
    with pytest.raises(BadEvidence, match=r"exits\.json"):
        read_exits("{", source="exits.json")


def test_a_launcher_and_a_log_speak_of_one_end(tmp_path):
    (tmp_path / "rank1.log").write_text(real.real_sets()["exception_exit"]["logs"]["rank1.log"])
    (tmp_path / "exits.json").write_text('{"1": 1}')
    found = collect([], logs=[str(tmp_path / "rank1.log")], exits=[str(tmp_path / "exits.json")])
    (end,) = found.evidence.exits
    assert (end.code, end.error) == (1, "ValueError: loss is nan")


def test_a_foreign_text_with_the_name_of_a_dump_is_not_taken_for_a_log(tmp_path):
    (tmp_path / "nccl_trace_rank_2").write_text("hello")
    (tmp_path / "rank_0.json").write_text('{"entries": [], "version": "2.10"}')
    (tmp_path / "rank_3.log").write_text("step 1 loss 2.0")
    (tmp_path / "train.node1.log").write_text(real.real_sets()["buffer_wrap"]["logs"]["rank0.log"])
    found = collect([str(tmp_path)])
    names = sorted(Path(file).name for file in found.files)
    assert names == ["rank_3.log", "train.node1.log"]


def test_logs_in_json_lines_are_read(tmp_path):
    line = real.real_sets()["buffer_wrap"]["logs"]["rank0.log"].splitlines()[4]
    (tmp_path / "rank0.log").write_text(json.dumps({"time": 1, "message": line}) + "\n")
    assert collect([str(tmp_path)]).book.ranks[0].is_waiting


def packed(path, name):
    """The logs of a set in a tar archive or a zip."""
    for file, text in real.real_sets()[name]["logs"].items():
        if path.suffix == ".zip":
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr(f"job/{file}", text)
        else:
            (path.parent / file).write_text(text)
    if path.suffix != ".zip":
        with tarfile.open(path, "w:gz") as archive:
            for file in real.real_sets()[name]["logs"]:
                archive.add(path.parent / file, f"job/{file}")
                (path.parent / file).unlink()
    return path


@pytest.mark.parametrize("name", ["logs.tar.gz", "logs.zip"])
def test_logs_in_an_archive_decide_alone(tmp_path, name):
    ran = CliRunner().invoke(main, ["analyze", str(packed(tmp_path / name, "exception_exit"))])
    assert ran.exit_code == 1 and "Rank 1" in ran.output


def test_an_archive_may_be_named_as_the_logs(tmp_path):
    archive = packed(tmp_path / "logs.tar.gz", "exception_exit")
    (end,) = collect([], logs=[str(archive)]).evidence.exits
    assert (end.rank, end.error) == (1, "ValueError: loss is nan")


def test_logs_in_an_object_store_are_read():
    store = fsspec.filesystem("memory")
    for file, text in real.real_sets()["exception_exit"]["logs"].items():
        store.pipe(f"/job7/{file}", text.encode())
    found = collect(["memory://job7"])
    assert sorted(found.book.ranks) == [0, 1, 2, 3]
    assert all("memory://" in file for file in found.files)


def test_a_store_that_cannot_be_reached_is_unusable_input():
    ran = CliRunner().invoke(main, ["analyze", "nosuchstore://bucket/dumps"])
    assert ran.exit_code == 3 and "cannot be read" in ran.output


def test_names_in_archives_lead_nowhere_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("../../../escaped.log", "text")
    (tmp_path / "in").mkdir()
    (one,) = unpack(str(tmp_path / "x.zip"), tmp_path / "in")
    assert tmp_path / "in" in Path(one.path).parents
