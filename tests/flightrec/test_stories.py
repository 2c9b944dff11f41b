"""One fault each, told small: what is named, and what is left alone."""

import copy

import pytest

import flightrec
from flightrec.model import (
    Evidence,
    Exit,
    Frontier,
    Group,
    Kind,
    RankRecord,
    Records,
    Stack,
    Verdict,
    Work,
)
from flightrec.synth import Fault, Job, Layout, synthesize, write_dumps

FOUR = Job(layout=Layout(dp=4), steps=6)


@pytest.fixture
def report(tmp_path):
    def analyze(dumps, **evidence):
        write_dumps(str(tmp_path), dumps)
        records = flightrec.load([str(tmp_path)])
        return flightrec.analyze(records, evidence=Evidence(**evidence))

    return analyze


def named(report):
    return [(c.rank, c.kind) for c in report.culprits]


def changed(dumps, rank, at=None, **values):
    """The same dumps with other values in one or all entries of one rank."""
    dumps = copy.deepcopy(dumps)
    for entry in dumps[rank]["entries"][slice(at, None if at is None else at + 1)]:
        entry.update(values)
    return dumps


def other_line(entry):
    return [entry["frames"][0], {"name": "log", "filename": "/srv/demo/log.py", "line": 5}]


def test_a_silent_mismatch_is_a_fault_that_does_not_hang(report):
    fault = Fault(rank=3, kind=Kind.SIZE_MISMATCH, step=2, is_silent=True)
    found = report(synthesize(FOUR, [fault]))
    assert named(found) == [(3, Kind.SIZE_MISMATCH)]
    assert not found.culprits[0].is_hanging and found.consequences == ()


def test_an_odd_call_site_hints_at_another_reduce_operation(report):
    dumps = synthesize(FOUR)
    dumps = changed(dumps, 1, 6, frames=other_line(dumps[1]["entries"][6]))
    assert named(report(dumps)) == [(1, Kind.REDUCE_OP_MISMATCH)]


def test_a_role_that_always_calls_from_its_own_line_is_no_fault(report):
    dumps = synthesize(FOUR)
    for entry in copy.deepcopy(dumps[0]["entries"])[::3]:
        at = entry["record_id"]
        dumps = changed(dumps, 0, at, frames=other_line(entry))
    assert report(dumps).verdict is Verdict.HEALTHY


def test_a_rank_that_gives_up_early_is_named_not_the_late_one(report):
    dumps = synthesize(FOUR, [Fault(rank=2, kind=Kind.NEVER_ISSUED, step=3)])
    assert named(report(dumps)) == [(2, Kind.NEVER_ISSUED)]
    assert named(report(changed(dumps, 1, timeout_ms=1000))) == [(1, Kind.ONE_SIDED_TIMEOUT)]


def test_who_never_created_the_group_is_named(report):
    dumps = synthesize(FOUR)
    for rank, dump in dumps.items():
        if rank != 2:
            dump["pg_config"]["9"] = {"name": "9", "desc": "late", "ranks": "[0, 1, 2, 3]"}
    assert named(report(dumps)) == [(2, Kind.INIT_HANG)]


def test_a_group_that_nobody_uses_yet_is_no_fault(report):
    dumps = synthesize(FOUR)
    for dump in dumps.values():
        dump["pg_config"]["9"] = {"name": "9", "desc": "late", "ranks": "[0, 1, 2, 3]"}
    assert report(dumps).verdict is Verdict.HEALTHY


def test_rings_that_wrapped_far_apart_still_name_the_call(report):
    job = Job(layout=Layout(dp=4), steps=30)
    fault = Fault(rank=1, kind=Kind.NEVER_ISSUED, step=10)
    found = report(synthesize(job, [fault], run_ahead=60, ring=12))
    assert named(found) == [(1, Kind.NEVER_ISSUED)]
    dumps = synthesize(job, [fault], run_ahead=60, ring=2000)
    assert found.culprits[0].seq == report(dumps).culprits[0].seq


def test_of_two_missing_ranks_none_is_named_without_more(report):
    faults = [Fault(rank=r, kind=Kind.DIED, step=2) for r in (1, 2)]
    dumps = synthesize(FOUR, faults)
    found = report(dumps)
    assert found.verdict is Verdict.UNDECIDED and "[1, 2]" in found.lacking[0]
    ended = Exit(rank=2, signal="SIGKILL", is_first_cause=True)
    assert named(report(dumps, exits=(ended,))) == [(2, Kind.DIED)]


def test_a_host_that_is_gone_is_named_whole(report):
    job = Job(layout=Layout(dp=8), steps=4)
    faults = [Fault(rank=r, kind=Kind.DIED, step=2) for r in (4, 5, 6, 7)]
    assert named(report(synthesize(job, faults))) == [(r, Kind.DIED) for r in (4, 5, 6, 7)]


def test_a_missing_dump_is_no_accusation_when_a_living_rank_explains_all(report):
    dumps = synthesize(FOUR, [Fault(rank=2, kind=Kind.NEVER_ISSUED, step=3)])
    del dumps[0]
    found = report(dumps)
    assert named(found) == [(2, Kind.NEVER_ISSUED)]


def test_a_straggler_is_the_one_with_short_durations(report):
    dumps = synthesize(FOUR, [Fault(rank=1, kind=Kind.STRAGGLER)], with_timing=True)
    found = report(dumps)
    assert named(found) == [(1, Kind.STRAGGLER)] and found.verdict is Verdict.FAULT


def test_the_stack_of_the_culprit_tells_where_it_is(report):
    from flightrec.model import Frame

    dumps = synthesize(FOUR, [Fault(rank=2, kind=Kind.NEVER_ISSUED, step=3)])
    stack = Stack(rank=2, frames=(Frame(name="read", filename="/srv/data.py", line=9),))
    assert report(dumps, stacks=(stack,)).culprits[0].where == "/srv/data.py:9 in read"


def test_a_stop_without_any_difference_is_undecided_and_says_what_would_help(report):
    dumps = synthesize(FOUR, [Fault(rank=2, kind=Kind.DEVICE_STALL, step=3)])
    found = report(dumps)
    assert found.verdict is Verdict.UNDECIDED
    assert "TORCH_NCCL_ENABLE_TIMING" in found.lacking[0]


def test_frontiers_from_log_lines_are_enough():
    group = Group(name="0", desc="default_pg", ranks=(0, 1, 2))
    waiting = Work(seq=7, op="ALLREDUCE")
    at_seven = Frontier(last_enqueued=9, last_completed=6, waiting=waiting)
    at_six = Frontier(last_enqueued=6, last_completed=6)
    ranks = {
        rank: RankRecord(rank=rank, source="log", frontiers={0: frontier})
        for rank, frontier in enumerate((at_seven, at_six, at_seven))
    }
    found = flightrec.analyze(Records(ranks=ranks, groups=(group,)))
    assert [(c.rank, c.kind, c.seq) for c in found.culprits] == [(1, Kind.NEVER_ISSUED, 7)]


@pytest.mark.parametrize("steps", [2, 9])
def test_a_group_that_was_made_again_under_its_name_is_another_group(report, steps):
    """Rank 1 hangs in the second life, while all numbers of the first life are higher."""
    first = synthesize(Job(layout=Layout(dp=4), steps=steps))
    second = synthesize(FOUR, [Fault(rank=1, kind=Kind.NEVER_ISSUED, step=1)])
    for rank, dump in second.items():
        entries = [{**e, "pg_id": e["pg_id"] + 10} for e in dump["entries"]]
        both = first[rank]["entries"] + entries
        dump["entries"] = [{**e, "record_id": i} for i, e in enumerate(both)]
        dump["pg_status"] = {}
    assert named(report(second)) == [(1, Kind.NEVER_ISSUED)]


PIPE = Job(layout=Layout(dp=2, pp=2), steps=6)


@pytest.mark.parametrize(
    "kind, job, rank",
    [
        (Kind.NEVER_ISSUED, FOUR, 2),
        (Kind.DIED, FOUR, 2),
        (Kind.WRONG_OP, FOUR, 1),
        (Kind.SIZE_MISMATCH, FOUR, 3),
        (Kind.DTYPE_MISMATCH, FOUR, 0),
        (Kind.ORDER_INVERSION, FOUR, 1),
        (Kind.SKIPPED_CALL, FOUR, 1),
        (Kind.EXTRA_CALL, FOUR, 1),
        (Kind.DEVICE_STALL, FOUR, 3),
        (Kind.P2P_NO_PARTNER, PIPE, 2),
        (Kind.UNEVEN_INPUTS, FOUR, 1),
        (Kind.STRAGGLER, FOUR, 1),
    ],
)
def test_each_kind_is_told_by_its_name(report, kind, job, rank):
    step = job.steps - 1 if kind is Kind.UNEVEN_INPUTS else 3
    dumps = synthesize(job, [Fault(rank=rank, kind=kind, step=step)], with_timing=True)
    assert named(report(dumps)) == [(rank, kind)]


def test_a_rank_that_has_not_come_to_its_send_never_issued_it(report):
    """Nobody left a send out: the rank is stuck before it, and its peer's receive shows that."""
    dumps = synthesize(PIPE, [Fault(rank=0, kind=Kind.NEVER_ISSUED, step=3)])
    (culprit,) = report(dumps).culprits
    assert (culprit.rank, culprit.kind, culprit.op) == (0, Kind.NEVER_ISSUED, "send")


def test_two_faults_at_once_are_both_named_and_nobody_else(report):
    job = Job(layout=Layout(dp=4, tp=2), steps=6)
    faults = [Fault(rank=r, kind=Kind.NEVER_ISSUED, step=3) for r in (1, 6)]
    assert sorted(named(report(synthesize(job, faults)))) == [
        (1, Kind.NEVER_ISSUED),
        (6, Kind.NEVER_ISSUED),
    ]


def test_a_gather_with_two_roots_names_the_unusual_one(report):
    dumps = synthesize(Job(layout=Layout(dp=4), steps=6, gathers=True))
    gathers = [e for e in dumps[2]["entries"] if e["profiling_name"].endswith(":gather")]
    shape = next(e for e in dumps[0]["entries"] if e["profiling_name"].endswith(":gather"))
    at = gathers[3]["record_id"]
    sizes = {key: shape[key] for key in ("output_sizes", "output_dtypes")}
    assert named(report(changed(dumps, 2, at, **sizes))) == [(2, Kind.ROOT_MISMATCH)]


def test_a_call_left_out_is_told_at_its_place_though_a_dump_is_lost(report):
    dumps = synthesize(FOUR, [Fault(rank=1, kind=Kind.SKIPPED_CALL, step=2)])
    whole = report(dumps).culprits[0]
    del dumps[3]
    (culprit,) = report(dumps).culprits
    assert (culprit.rank, culprit.kind, culprit.seq) == (1, Kind.SKIPPED_CALL, whole.seq)


def test_dumps_of_active_calls_only_still_tell_the_number_of_the_call(report):
    dumps = synthesize(FOUR, [Fault(rank=2, kind=Kind.NEVER_ISSUED, step=3)])
    whole = report(dumps).culprits[0]
    for dump in dumps.values():
        dump["entries"] = [e for e in dump["entries"] if e["state"] != "completed"]
    (culprit,) = report(dumps).culprits
    assert (culprit.rank, culprit.seq) == (2, whole.seq)
