"""Every real set: the right ranks, and no innocent one."""

import json
import tarfile
from pathlib import Path

import pytest

import flightrec
from flightrec.model import Evidence, Exit, Kind, Verdict

SETS = Path(__file__).parent / "sets"
NEEDS_MORE = {"kill9_ras", "new_group_not_joined"}  # the dumps alone cannot tell
KINDS = {  # sets whose truth is told in words only
    "batch_p2p_missing_recv": (Kind.P2P_NO_PARTNER, 4),
    "buffer_wrap": (Kind.NEVER_ISSUED, 47),
    "device_busy": (Kind.DEVICE_STALL, 7),
    "dp_tp_fault_in_tp": (Kind.NEVER_ISSUED, 17),
    "exception_exit": (Kind.DIED, 3),
    "hang_missing_call": (Kind.NEVER_ISSUED, 7),
    "kill9_mid_collective": (Kind.DIED, 7),
    "order_inversion": (Kind.ORDER_INVERSION, 5),
    "p2p_send_without_recv": (Kind.P2P_NO_PARTNER, 4),
    "size_mismatch": (Kind.SIZE_MISMATCH, 7),
    "size_mismatch_hang": (Kind.SIZE_MISMATCH, 7),
    "skipped_call_same_shape": (Kind.SKIPPED_CALL, 8),
    "straggler": (Kind.STRAGGLER, 14),
    "stuck_dataloader": (Kind.NEVER_ISSUED, 7),
    "type_mismatch": (Kind.WRONG_OP, 7),
}
GLOO_BLIND = {"pipeline_leaves_early"}  # gloo records no sends: the rank is right, not the kind


def names(archive):
    with tarfile.open(SETS / f"{archive}.tar.gz") as tar:
        return sorted({(archive, name.split("/")[0]) for name in tar.getnames()})


def analyze(folder, evidence=None):
    return flightrec.analyze(flightrec.load([str(folder / "dumps")]), evidence=evidence)


def truth_of(folder):
    truth = json.loads((folder / "truth.json").read_text())
    culprit = truth.get("culprit")
    return truth.get("culprits", [] if culprit is None else [culprit]), truth


@pytest.mark.parametrize("archive, name", names("nccl") + names("gloo"))
def test_the_culprits_and_nobody_else(sets, archive, name):
    folder = sets / archive / name
    report = analyze(folder)
    culprits, truth = truth_of(folder)
    if name in NEEDS_MORE:
        assert not report.culprits
        return
    assert sorted(c.rank for c in report.culprits) == culprits, report
    assert report.verdict is (Verdict.FAULT if culprits else Verdict.HEALTHY)
    if archive == "gloo" and culprits and name not in GLOO_BLIND:
        assert {c.kind for c in report.culprits} == {truth["kind"]}
        assert truth["seq"] in (None, report.culprits[0].seq)
    if archive == "nccl" and name in KINDS:
        assert (report.culprits[0].kind, report.culprits[0].seq) == KINDS[name]


def test_victims_are_told_from_the_dead_by_their_exits(sets):
    exits = (Exit(rank=2, signal="SIGKILL", is_first_cause=True), Exit(rank=3, code=1, error="x"))
    report = analyze(sets / "nccl" / "kill9_ras", Evidence(exits=exits))
    assert [(c.rank, c.kind) for c in report.culprits] == [(2, Kind.DIED)]
    alone = analyze(sets / "nccl" / "kill9_ras", Evidence(exits=exits[1:]))
    assert [c.rank for c in alone.culprits] == [2]
    assert analyze(sets / "nccl" / "kill9_ras").verdict is Verdict.UNDECIDED


def test_consequences_are_told_apart(sets):
    report = analyze(sets / "nccl" / "dp_tp_fault_in_tp")
    assert [(c.rank, c.waits_for) for c in report.consequences] == [(0, (2,)), (1, (3,)), (2, (3,))]


def test_a_circle_is_shown(sets):
    report = analyze(sets / "nccl" / "order_inversion")
    assert [f.code for f in report.findings] == ["circle"]


def test_any_order_of_files_gives_the_same_bytes(sets):
    folder = sets / "nccl" / "dp_tp_fault_in_tp" / "dumps"
    files = sorted(map(str, folder.iterdir()))
    reports = {
        json.dumps(flightrec.analyze(flightrec.load(order)).to_json())
        for order in (files, files[::-1], files[2:] + files[:2])
    }
    assert len(reports) == 1


def test_json_dumps_say_the_same_as_pickles(sets):
    straggler = sets / "nccl" / "straggler"
    by_json = flightrec.analyze(flightrec.load([str(straggler / "api")]))
    assert [(c.rank, c.kind) for c in by_json.culprits] == [(3, Kind.STRAGGLER)]
