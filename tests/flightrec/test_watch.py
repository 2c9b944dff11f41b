"""A live job: gloo ranks that hang are made to dump, and what they answer is collected."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import flightrec
from flightrec.__main__ import main
from flightrec.errors import NoPipes
from flightrec.model import Culprit, Kind, Report, Verdict
from flightrec.record import DumpOnRequest, stacks_text, warm_recorder
from flightrec.watch import GONE, ask, find_listeners, find_pids, take_stacks, until_fault

HERE = Path(__file__).parent


class Job:
    """Three gloo ranks on this machine, in processes of their own."""

    def __init__(self, folder, mode):
        self.prefix = str(folder / "fr_")
        env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
        args = ["3", str(folder / "store"), self.prefix, mode]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "hanging_rank.py"), str(rank), *args],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]

    def __enter__(self):
        for rank in self.ranks:
            assert rank.stdout.readline() == "hanging\n"
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("stuck"), "stuck") as job:
        yield job


def watch(prefix, *args):
    result = CliRunner().invoke(main, ["watch", prefix, "--json", *args])
    return result.exit_code, json.loads(result.stdout)


def test_a_hang_of_a_live_job_names_the_rank_that_is_stuck(stuck, tmp_path):
    code, report = watch(stuck.prefix, "--out", str(tmp_path))
    assert code == 1
    assert [(c["rank"], c["kind"], c["seq"]) for c in report["culprits"]] == [
        (1, "never_issued", 5)
    ]
    assert sorted(one["rank"] for one in report["consequences"]) == [0, 2]
    assert "load_next_batch" in (tmp_path / "rank_1.stack").read_text()


def test_the_stack_of_the_stuck_rank_is_in_the_report(stuck):
    report = flightrec.watch_job(stuck.prefix)
    (culprit,) = report.culprits
    assert any(frame.name == "load_next_batch" for frame in culprit.stack) or (
        "load_next_batch" in culprit.where + " ".join(culprit.because)
    )


def test_all_ranks_answer_although_their_main_threads_hang(stuck):
    answers = ask(find_listeners(stuck.prefix), wait_s=20)
    assert [a.rank for a in answers] == [0, 1, 2]
    assert all(a.seconds is not None and not a.is_gone for a in answers)


def test_the_processes_are_found_by_their_pipes(stuck):
    pids = find_pids(find_listeners(stuck.prefix))
    assert pids == {rank: process.pid for rank, process in enumerate(stuck.ranks)}


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="needs py-spy, see the dev extra")
def test_pyspy_shows_where_a_process_stands(stuck, tmp_path):
    if take_stacks({1: stuck.ranks[1].pid}, tmp_path) != [1]:
        pytest.skip("py-spy may not trace processes here (ptrace)")
    assert "load_next_batch" in (tmp_path / "rank_1.pyspy.txt").read_text()


def test_looking_twice_confirms_the_hang(stuck):
    code, report = watch(stuck.prefix, "--every-s", "0.01", "--looks", "5")
    assert code == 1
    assert report["culprits"][0]["rank"] == 1


def test_a_killed_rank_is_named_because_nobody_reads_its_pipe(tmp_path):
    with Job(tmp_path, "stuck") as job:
        job.ranks[2].kill()
        job.ranks[2].wait()
        answers = ask(find_listeners(job.prefix), wait_s=20)
        assert [a.rank for a in answers if a.is_gone] == [2]
        _, report = watch(job.prefix)
    assert (2, "died") in [(c["rank"], c["kind"]) for c in report["culprits"]]
    assert GONE in json.dumps(report)


def test_a_prefix_without_pipes_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(NoPipes, match="no pipe"):
        find_listeners(str(tmp_path / "fr_"))
    result = CliRunner().invoke(main, ["watch", str(tmp_path / "fr_")])
    assert result.exit_code == 3
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in result.stderr


def test_an_old_dump_of_a_rank_that_does_not_answer_is_not_taken_for_an_answer(tmp_path):
    os.mkfifo(tmp_path / "fr_0.pipe")
    (tmp_path / "fr_0").write_bytes(b"old.")
    reader = os.open(tmp_path / "fr_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    (answer,) = ask(find_listeners(str(tmp_path / "fr_")), wait_s=0.3)
    os.close(reader)
    assert answer.seconds is None
    assert not answer.is_gone


def test_the_pipe_is_gone_after_the_block(tmp_path):
    with DumpOnRequest(str(tmp_path / "fr_"), 4) as listener:
        assert listener.pipe.is_fifo()
    assert not listener.pipe.exists()
    assert not any(thread.name == "flightrec-dump" for thread in threading.enumerate())


def test_stacks_name_every_thread_and_begin_with_the_main_one():
    text = stacks_text()
    assert text.startswith("Thread 0x")
    assert "[MainThread] (most recent call first)" in text.splitlines()[0]
    assert "test_stacks_name_every_thread" in text


def test_warming_up_imports_what_the_first_dump_would_import():
    code = (
        "import flightrec, sys; assert 'torch' not in sys.modules; "
        "flightrec.warm_recorder().join(); assert 'torch._dynamo' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parent.parent)


def test_warming_up_never_fails_where_there_is_no_recorder(monkeypatch):
    monkeypatch.setattr("flightrec.record.dump_bytes", lambda: 1 / 0)
    warm_recorder().join()


def case(*culprits):
    verdict = Verdict.FAULT if culprits else Verdict.HEALTHY
    return SimpleNamespace(report=Report(verdict=verdict, summary="x", culprits=culprits))


def hang(rank, seq):
    return Culprit(rank=rank, kind=Kind.NEVER_ISSUED, group="default_pg", seq=seq)


def test_a_slow_rank_that_moves_between_looks_is_not_a_hang():
    looks = iter([case(hang(1, 5)), case(hang(1, 9)), case(), case(hang(1, 9)), case(hang(1, 9))])
    slept = []
    found = until_fault(lambda: next(looks), every_s=3.0, sleep=slept.append)
    assert found.report.culprits[0].seq == 9
    assert slept == [3.0] * 4


def test_a_fault_that_does_not_hang_is_told_at_once():
    straggler = Culprit(rank=2, kind=Kind.STRAGGLER, group="default_pg", is_hanging=False)
    looks = iter([case(), case(straggler)])
    assert until_fault(lambda: next(looks), every_s=1.0, sleep=lambda _: None).report.culprits
