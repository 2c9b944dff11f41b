"""Log lines alone: right ranks, right kind, and never an innocent."""

import itertools
import random

import pytest

from flightrec.logdiag import diagnose_logs
from flightrec.logs import looks_like_log, rank_from_name, read_logs
from flightrec.model import Kind, Verdict
from tests.flightrec import real

NAMED = {  # what lines can show; the other sets need dumps
    "hang_missing_call": (1, Kind.NEVER_ISSUED, 7),
    "stuck_dataloader": (3, Kind.NEVER_ISSUED, 7),
    "buffer_wrap": (1, Kind.NEVER_ISSUED, 47),
    "dp_tp_fault_in_tp": (3, Kind.NEVER_ISSUED, 17),
    "skipped_call_same_shape": (1, Kind.NEVER_ISSUED, 14),
    "kill9_mid_collective": (2, Kind.DIED, 7),
    "kill9_ras": (2, Kind.DIED, 5),
    "exception_exit": (1, Kind.DIED, None),
    "p2p_send_without_recv": (1, Kind.P2P_NO_PARTNER, 3),
}


def logs_of(name):
    return real.real_sets()[name]["logs"]


def as_files(logs):
    return [(file, text.splitlines()) for file, text in logs.items()]


def as_paste(logs):
    return [("paste.txt", "".join(logs.values()).splitlines())]


def verdict_on(*lines, name="paste.txt", **options):
    return diagnose_logs(read_logs([(name, "\n".join(lines).splitlines())]), **options)


def guilty(report):
    return [(c.rank, c.kind) for c in report.culprits]


@pytest.mark.parametrize("name", real.NAMES)
def test_logs_of_real_jobs_name_the_rank_or_say_what_is_lacking(name):
    report = diagnose_logs(read_logs(as_files(logs_of(name))))
    if name in NAMED:
        rank, kind, seq = NAMED[name]
        assert [(c.rank, c.kind, c.seq) for c in report.culprits] == [(rank, kind, seq)]
        assert rank == real.real_sets()[name]["culprit"]
    else:
        assert report.verdict is Verdict.UNDECIDED
        assert report.lacking


@pytest.mark.parametrize("name", real.NAMES)
def test_whatever_part_is_pasted_no_innocent_rank_is_named(name):
    truth = real.real_sets()[name]["culprit"]
    logs = logs_of(name)
    for size in range(1, len(logs) + 1):
        for part in itertools.combinations(sorted(logs), size):
            chosen = {file: logs[file] for file in part}
            for given in (as_files(chosen), as_paste(chosen)):
                report = diagnose_logs(read_logs(given))
                assert {c.rank for c in report.culprits} <= {truth}, part


@pytest.mark.parametrize("name", real.NAMES)
def test_torn_and_shuffled_lines_name_no_innocent(name):
    truth = real.real_sets()[name]["culprit"]
    lines = "".join(logs_of(name).values()).splitlines()
    for seed in range(20):
        rng = random.Random(seed)
        kept = [line for line in lines if rng.random() < 0.7]
        report = diagnose_logs(read_logs([("paste.txt", kept)]))
        assert {c.rank for c in report.culprits} <= {truth}, seed


def test_the_order_of_files_changes_nothing():
    files = as_files(logs_of("dp_tp_fault_in_tp"))
    reports = {
        str(diagnose_logs(read_logs(order)).to_json()) for order in itertools.permutations(files)
    }
    assert len(reports) == 1


def test_an_exception_is_quoted_with_its_source_line():
    culprit = diagnose_logs(read_logs(as_files(logs_of("exception_exit")))).culprits[0]
    assert "ValueError: loss is nan" in culprit.because[0]
    assert culprit.where.endswith("nccl_fr_cases.py:456 in before")


def test_a_paste_of_the_survivors_needs_the_world_size_to_name_the_dead():
    lines = as_paste(logs_of("kill9_mid_collective"))
    assert diagnose_logs(read_logs(lines)).lacking
    assert guilty(diagnose_logs(read_logs(lines), world_size=4)) == [(2, Kind.DIED)]


TORCH_2_1 = (
    "[E ProcessGroupNCCL.cpp:475] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=11, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) "
    "ran for 1800116 milliseconds before timing out."
)
TORCH_1_13 = (
    "[E ProcessGroupNCCL.cpp:821] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=11, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1804411 milliseconds "
    "before timing out."
)
TORCH_2_2 = "[rank{r}]:" + TORCH_2_1
TORCH_2_3 = (
    "[rank{r}]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank {r}] Timeout at NCCL work: 11, "
    "last enqueued NCCL work: 12, last completed NCCL work: 10."
)
TORCH_2_4 = (
    "[rank{r}]:[E909 09:55:35.2 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank {r}] Exception "
    "(either an error or timeout) detected by watchdog at work: 11, last enqueued NCCL work: 12, "
    "last completed NCCL work: 10."
)
TORCH_2_5 = (
    "[rank{r}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {r}]"
    " Exception (either an error or timeout) detected by watchdog at work: 11, last enqueued NCCL "
    "work: 12, last completed NCCL work: 10."
)
TORCH_2_7 = (
    "[rank{r}]:[E1130 21:09:08.7 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0 Rank {r}]  failure "
    "detected by watchdog at work sequence id: 11 PG status: last enqueued work: 12, last "
    "completed work: 10"
)
IDLE_2_3 = (
    "[rank{r}]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank {r}] Received a global timeout from another"
    " rank and will start to dump the debug info. Last enqueued NCCL work: 10, last completed "
    "NCCL work: 10."
)
IDLE_2_4 = (
    "[rank{r}]:[E909 09:55:35.2 ProcessGroupNCCL.cpp:1316] [PG 0 (default_pg) Rank {r}] Received a "
    "dump signal from this local rank and will start to dump the debug info. Last enqueued NCCL "
    "work: 10, last completed NCCL work: 10."
)
IDLE_2_5 = (
    "[rank{r}]:[E703 15:37:17.1 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank {r}]"
    " Received a dump signal due to a collective timeout from  rank 0 and we will try our best to "
    "dump the debug info. Last enqueued NCCL work: 10, last completed NCCL work: 10.This is most"
)


@pytest.mark.parametrize(
    "waiting", [TORCH_1_13, TORCH_2_1, TORCH_2_2, TORCH_2_3, TORCH_2_4, TORCH_2_5, TORCH_2_7]
)
def test_the_waiting_line_of_each_torch_is_read(waiting):
    book = read_logs([("paste.txt", [waiting.format(r=3)])])
    assert book.ranks[3].groups[0].open_seq == 11


@pytest.mark.parametrize(
    ("waiting", "idle"),
    [
        (TORCH_2_3, IDLE_2_3),
        (TORCH_2_4, IDLE_2_4),
        (TORCH_2_5, IDLE_2_5),
        (TORCH_2_7, IDLE_2_5),
    ],
)
def test_each_torch_that_prints_frontiers_shows_who_never_came(waiting, idle):
    lines = [waiting.format(r=r) for r in (0, 1, 3)] + [idle.format(r=2)]
    assert guilty(verdict_on(*lines)) == [(2, Kind.NEVER_ISSUED)]


def test_before_frontiers_the_silent_log_file_is_the_one_that_never_came():
    files = [(f"rank{r}.log", [TORCH_2_1.format(r=r)]) for r in (0, 1, 3)]
    report = diagnose_logs(read_logs([*files, ("rank2.log", ["step 10 loss 2.1"])]))
    assert guilty(report) == [(2, Kind.NEVER_ISSUED)]


def test_all_waiting_in_one_call_is_undecided_and_asks_for_timing():
    report = verdict_on(*(TORCH_2_5.format(r=r) for r in range(4)))
    assert report.verdict is Verdict.UNDECIDED
    assert "TORCH_NCCL_ENABLE_TIMING" in report.lacking[0]


def test_one_rank_with_another_operation_at_the_same_call_is_named():
    lines = [(TORCH_2_1 + "\n" + TORCH_2_5).format(r=r) for r in range(4)]
    lines[2] = lines[2].replace("ALLREDUCE", "BROADCAST")
    files = [(f"rank{r}.log", line.splitlines()) for r, line in enumerate(lines)]
    assert guilty(diagnose_logs(read_logs(files))) == [(2, Kind.WRONG_OP)]


def test_one_rank_with_another_size_is_named_but_not_where_sizes_may_differ():
    lines = [(TORCH_2_1 + "\n" + TORCH_2_5).format(r=r) for r in range(4)]
    lines[1] = lines[1].replace("NumelIn=1,", "NumelIn=9,")
    files = [(f"rank{r}.log", line.splitlines()) for r, line in enumerate(lines)]
    assert guilty(diagnose_logs(read_logs(files))) == [(1, Kind.SIZE_MISMATCH)]
    uneven = [(n, [x.replace("ALLREDUCE", "ALLGATHER") for x in text]) for n, text in files]
    assert diagnose_logs(read_logs(uneven)).verdict is Verdict.UNDECIDED


def test_one_call_too_many_is_charged_to_the_rank_that_made_it():
    files = [("rank0.log", [TORCH_2_5.format(r=0)])]
    files += [(f"rank{r}.log", [IDLE_2_5.format(r=r)]) for r in range(1, 6)]
    assert guilty(diagnose_logs(read_logs(files))) == [(0, Kind.EXTRA_CALL)]


def test_a_desync_report_names_a_rank_that_has_no_lines_itself():
    lines = logs_of("hang_missing_call")["rank0.log"].splitlines()
    report = diagnose_logs(read_logs([("paste.txt", lines)]))
    assert guilty(report) == [(1, Kind.NEVER_ISSUED)]


def test_torchrun_table_shows_which_rank_failed_first():
    table = """
    ------------------------------------------------------------
    Root Cause (first observed failure):
    [0]:
      time      : 2026-11-30_21:09:00
      host      : host-7
      rank      : 5 (local_rank: 1)
      exitcode  : -9 (pid: 450)
    """
    report = verdict_on(TORCH_2_5.format(r=0), TORCH_2_5.format(r=1), table)
    assert guilty(report) == [(5, Kind.DIED)]
    assert "SIGKILL" in report.culprits[0].because[0]


def test_an_abort_by_the_watchdog_is_no_cause():
    table = "Root Cause (first observed failure):\n rank      : 1 (local_rank: 1)\n exitcode  : -6"
    lines = [TORCH_2_5.format(r=0), TORCH_2_5.format(r=1), table]
    assert verdict_on(*lines).verdict is Verdict.UNDECIDED


def test_who_waits_for_the_communicator_id_names_who_never_published_it():
    line = (
        "[rank{r}]: torch.distributed.DistBackendError: [{r}] is setting up NCCL communicator and "
        "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0')"
        " got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
    )
    assert guilty(verdict_on(line.format(r=1), line.format(r=2))) == [(0, Kind.INIT_HANG)]


def test_the_rank_missing_from_the_rendezvous_is_named_when_the_world_is_known():
    files = [(f"rank{r}.log", ["Timed out after 601 s. 3/4 clients joined."]) for r in (0, 1, 3)]
    assert guilty(diagnose_logs(read_logs(files))) == [(2, Kind.INIT_HANG)]


def test_monitored_barrier_names_the_absent():
    line = "RuntimeError: Rank 3 failed to pass monitoredBarrier in 30000 ms"
    assert guilty(verdict_on(line)) == [(3, Kind.NEVER_ISSUED)]


def test_a_traceback_without_a_rank_is_shown_but_charged_to_nobody():
    trace = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "KeyError: 'x'"]
    report = verdict_on(TORCH_2_5.format(r=0), *trace)
    assert not report.culprits
    assert any("KeyError" in finding.text for finding in report.findings)


def test_colours_launcher_prefixes_and_line_numbers_do_not_hide_a_line():
    line = "\x1b[36m(Worker pid=4009)\x1b[0m [80746] " + TORCH_2_5.format(r=4)
    assert read_logs([("paste.txt", [line])]).ranks[4].groups[0].open_seq == 11


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("run/rank3.log", 3),
        ("attempt_0/2/stderr.log", 2),
        ("trainer_rank_12.txt", 12),
        ("7.log", 7),
        ("frank2go.log", None),
        ("torchfrtrace_2.11.txt", None),
        ("train.log", None),
    ],
)
def test_the_rank_is_taken_from_usual_file_names_only(name, rank):
    assert rank_from_name(name) == rank


def test_ordinary_training_output_is_not_taken_for_a_watchdog_log():
    assert not looks_like_log("step 1 loss 3.2\nstep 2 loss 3.1\n[rank0] saved checkpoint")


def test_who_waits_in_a_barrier_while_others_reduce_ran_out_of_input():
    lines = [(TORCH_2_1 + "\n" + TORCH_2_5).format(r=r) for r in range(4)]
    lines[3] = lines[3].replace("ALLREDUCE", "BARRIER")
    files = [(f"rank{r}.log", line.splitlines()) for r, line in enumerate(lines)]
    assert guilty(diagnose_logs(read_logs(files))) == [(3, Kind.UNEVEN_INPUTS)]


def test_a_rank_with_a_shorter_time_out_gave_up_alone():
    early = TORCH_2_1.replace("1800000", "7000").replace("1800116", "7016")
    lost = (
        "[rank{r}]:[E1130 21:11:27.6 ProcessGroupNCCL.cpp:612] [Rank {r}] Collective WorkNCCL("
        "SeqNum=11, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=90000) raised the "
        "following async exception: NCCL error: remote process exited or there was a network error"
    )
    lines = [((early if r == 2 else lost) + "\n" + TORCH_2_5).format(r=r) for r in range(4)]
    files = [(f"rank{r}.log", line.splitlines()) for r, line in enumerate(lines)]
    assert guilty(diagnose_logs(read_logs(files))) == [(2, Kind.ONE_SIDED_TIMEOUT)]


def test_the_stage_that_waits_in_nothing_holds_up_a_pipeline():
    recv = (TORCH_2_1 + "\n" + TORCH_2_5).replace("ALLREDUCE", "RECV")
    files = [(f"rank{r}.log", recv.format(r=r).splitlines()) for r in (0, 1, 3)]
    files.append(("rank2.log", [IDLE_2_5.format(r=2).replace("work: 10", "work: 40")]))
    assert guilty(diagnose_logs(read_logs(files))) == [(2, Kind.NEVER_ISSUED)]


def test_survivors_that_only_raise_still_point_to_the_silent_rank():
    trace = [
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in step',
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242",
    ]
    files = [(f"rank{r}.log", trace) for r in (0, 1, 3)]
    report = diagnose_logs(read_logs([*files, ("rank2.log", ["step 3 loss 1.2"])]))
    assert guilty(report) == [(2, Kind.DIED)]


def test_a_handled_exception_of_a_rank_that_is_still_alive_is_no_death():
    trace = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "KeyError: 'x'"]
    files = [(f"rank{r}.log", [TORCH_2_5.format(r=r)]) for r in (0, 1, 3)]
    files.append(("rank2.log", [*trace, IDLE_2_5.format(r=2)]))
    report = diagnose_logs(read_logs(files))
    assert guilty(report) == [(2, Kind.NEVER_ISSUED)]
    assert any("KeyError" in text for text in report.culprits[0].because)


def test_ranks_that_wait_in_different_calls_are_told_as_such():
    lines = [TORCH_2_1.format(r=r).replace("SeqNum=11", f"SeqNum={11 + r}") for r in (0, 3)]
    report = verdict_on(*lines)
    assert report.verdict is Verdict.UNDECIDED
    assert "rank 0 in #11, rank 3 in #14" in report.summary


@pytest.mark.parametrize("name", real.NAMES)
def test_the_quick_look_at_a_line_loses_nothing(name, monkeypatch):
    files = as_files(logs_of(name))
    quick = read_logs(files)
    monkeypatch.setattr("flightrec.logs._may_matter", lambda line: True)
    assert read_logs(files) == quick
