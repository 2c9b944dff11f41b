"""Evidence beside the dumps: exit codes, and sorting files by their content."""

import gzip
import json
import pickle
from pathlib import Path

import pytest

from flightrec.errors import BadEvidence
from flightrec.evidence import collect
from flightrec.exits import read_exits
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
