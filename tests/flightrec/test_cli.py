"""The command: exit codes, files, errors with a remedy, the same bytes for the same input."""

import gzip
import json
import pickle

import pytest
from click.testing import CliRunner

from flightrec.__main__ import main
from flightrec.anonymize import Names, anonymize_log
from flightrec.diff import diff_ranks, diff_text
from tests.flightrec import real, real_dumps


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def logs_folder(folder, name):
    for file, text in real.real_sets()[name]["logs"].items():
        (folder / file).write_text(text)
    return folder


def test_a_fault_in_logs_is_told_on_one_screen_with_exit_code_1(tmp_path):
    result = run("analyze", logs_folder(tmp_path, "kill9_mid_collective"))
    assert result.exit_code == 1
    assert result.stdout.startswith("FAULT  Rank 2 died")
    assert len(result.stdout.splitlines()) <= 24


def test_logs_that_do_not_decide_are_exit_code_2_and_say_what_is_lacking(tmp_path):
    result = run("analyze", logs_folder(tmp_path, "device_busy"))
    assert result.exit_code == 2
    assert "TORCH_NCCL_ENABLE_TIMING=1" in result.stdout


def test_unusable_input_is_exit_code_3_with_a_remedy(tmp_path):
    result = run("analyze", tmp_path / "nowhere")
    assert result.exit_code == 3
    assert "does not exist" in result.stderr
    assert "TORCH_FR_DUMP_TEMP_FILE" in result.stderr
    assert "Traceback" not in result.output


def test_a_folder_without_dumps_and_logs_is_exit_code_3(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x00")
    assert run("analyze", tmp_path).exit_code == 3


@pytest.mark.parametrize("args", [["analyze"], ["nonsense"], ["analyze", ".", "--world-size", "x"]])
def test_wrong_usage_is_exit_code_4(args):
    assert run(*args).exit_code == 4


def test_an_output_that_cannot_be_written_is_exit_code_4(tmp_path):
    logs_folder(tmp_path, "device_busy")
    result = run("analyze", tmp_path, "--html", tmp_path / "no" / "such.html")
    assert result.exit_code == 4
    assert "cannot write" in result.stderr


def test_the_json_holds_what_the_schema_promises(tmp_path):
    result = run("analyze", logs_folder(tmp_path, "dp_tp_fault_in_tp"), "--json")
    report = json.loads(result.stdout)
    assert (report["schema"], report["verdict"]) == ("flightrec/1", "fault")
    (culprit,) = report["culprits"]
    assert (culprit["rank"], culprit["kind"], culprit["seq"]) == (3, "never_issued", 17)
    assert {"group", "op", "where", "confidence", "because"} <= set(culprit)
    assert [one["rank"] for one in report["consequences"]] == [0, 1, 2]


def test_paths_in_any_order_give_the_same_bytes(tmp_path):
    files = sorted(logs_folder(tmp_path, "dp_tp_fault_in_tp").iterdir())
    outputs = {run("analyze", "--json", *order).stdout for order in (files, files[::-1])}
    assert len(outputs) == 1


def test_one_run_writes_page_trace_and_matrix(tmp_path):
    dumps = real_dumps.small_dumps(tmp_path / "dumps")
    html, trace = tmp_path / "out.html", tmp_path / "out.json.gz"
    result = run("analyze", dumps, "--html", html, "--perfetto", trace, "--matrix")
    assert result.exit_code in (1, 2)
    assert "ranks" in result.stdout
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_a_world_size_names_the_rank_that_no_pasted_line_mentions(tmp_path):
    paste = tmp_path / "paste.txt"
    paste.write_text("".join(real.real_sets()["kill9_mid_collective"]["logs"].values()))
    assert run("analyze", paste).exit_code == 2
    result = run("analyze", paste, "--world-size", 4)
    assert result.exit_code == 1
    assert "Rank 2 died" in result.stdout


def test_ras_alone_names_the_rank_with_fewer_calls(tmp_path):
    answer = tmp_path / "ras.json"
    answer.write_text(real.real_sets()["hang_missing_call"]["ras"]["ras_json.txt"])
    result = run("analyze", answer)
    assert result.exit_code == 1
    assert "rank 1 launched 6 AllReduce calls" in result.stdout


def test_exit_codes_of_a_launcher_name_the_dead_where_logs_do_not(tmp_path):
    logs_folder(tmp_path, "kill9_ras")
    (tmp_path / "rank2.log").unlink()
    ends = tmp_path / "ends.json"
    ends.write_text(json.dumps(real.real_sets()["kill9_ras"]["exit"]))
    result = run("analyze", tmp_path, "--exits", ends)
    assert "Rank 2 died" in result.stdout
    assert "SIGKILL" in result.stdout


def test_a_rank_that_raised_is_shown_where_it_raised(tmp_path):
    real_dumps.write_dump(tmp_path, 0, [real_dumps.entry(0, 1, state="scheduled")])
    log = real.real_sets()["exception_exit"]["logs"]["rank1.log"]
    (tmp_path / "rank1.log").write_text(log)
    (culprit,) = json.loads(run("analyze", tmp_path, "--json").stdout)["culprits"]
    assert (culprit["rank"], culprit["kind"]) == (1, "died")
    assert culprit["where"].endswith("nccl_fr_cases.py:456 in before")


def test_show_prints_the_calls_of_a_rank_with_their_source(tmp_path):
    dumps = real_dumps.small_dumps(tmp_path / "dumps")
    result = run("show", 0, dumps)
    assert result.exit_code == 0
    assert "all_reduce [8] Float" in result.stdout
    assert "train.py:41 in train_secret_model" in result.stdout
    assert "1 of 1 calls" in run("show", 1, dumps, "--all", "--stacks").stdout


def test_show_of_a_rank_that_is_not_there_says_which_are(tmp_path):
    result = run("show", 7, real_dumps.small_dumps(tmp_path / "dumps"))
    assert result.exit_code == 3
    assert "only of ranks 0, 1" in result.stderr


def test_diff_finds_the_first_call_that_differs(tmp_path):
    calls = [real_dumps.entry(i, i + 1) for i in range(6)]
    real_dumps.write_dump(tmp_path, 0, calls)
    real_dumps.write_dump(tmp_path, 1, [*calls[:3], real_dumps.entry(3, 4, line=77), *calls[4:]])
    result = run("diff", tmp_path, tmp_path, "--ranks", "0,1")
    assert result.exit_code == 1
    assert "call #4: called from another line" in result.stdout
    assert run("diff", tmp_path, tmp_path).exit_code == 0


def test_diff_tells_operation_size_and_a_missing_call_apart(tmp_path):
    calls = [real_dumps.entry(i, i + 1) for i in range(3)]
    others = {
        "another operation": [*calls[:1], real_dumps.entry(1, 2, op="broadcast"), calls[2]],
        "another size": [*calls[:1], real_dumps.entry(1, 2, size=9), calls[2]],
        "one side made no further call": calls[:2],
    }
    for what, other in others.items():
        folder = tmp_path / what.replace(" ", "_")
        real_dumps.write_dump(folder, 0, calls)
        real_dumps.write_dump(folder, 1, other)
        assert what in run("diff", folder, folder, "--ranks", "0,1").stdout


def test_diff_does_not_mind_where_the_code_lies(tmp_path):
    import flightrec

    records = flightrec.load([str(real_dumps.small_dumps(tmp_path / "a"))])
    assert "made the same 1 calls" in diff_text(diff_ranks(records, 1, records, 1))


def test_an_anonymous_copy_keeps_the_calls_and_no_name(tmp_path):
    dumps = real_dumps.small_dumps(tmp_path / "dumps", group="alice_mesh")
    logs_folder(dumps, "exception_exit")
    result = run("anonymize", dumps, "--out", tmp_path / "copy")
    assert result.exit_code == 0
    text = b"".join(file.read_bytes() for file in (tmp_path / "copy").iterdir())
    for secret in (b"alice", b"secret", b"nccl_fr_cases", b"loss is nan", b"harness"):
        assert secret not in text
    assert b"all_reduce" in text
    assert b"ValueError" in text
    before = run("show", 0, dumps).stdout.splitlines()[2]
    assert (
        run("show", 0, tmp_path / "copy").stdout.splitlines()[2].split()[2:] == before.split()[2:]
    )


def test_an_anonymous_copy_of_logs_gives_the_same_verdict(tmp_path):
    for name in real.NAMES:
        folder = tmp_path / name
        folder.mkdir()
        logs_folder(folder, name)
        run("anonymize", folder, "--out", tmp_path / f"{name}_copy")
        ours, theirs = (
            json.loads(run("analyze", f, "--json").stdout or "{}")
            for f in (folder, tmp_path / f"{name}_copy")
        )
        names = [(c["rank"], c["kind"], c["seq"]) for c in ours["culprits"]]
        assert [(c["rank"], c["kind"], c["seq"]) for c in theirs["culprits"]] == names, name


def test_an_anonymous_copy_goes_into_a_new_folder_only(tmp_path):
    dumps = real_dumps.small_dumps(tmp_path / "dumps")
    assert run("anonymize", dumps, "--out", dumps).exit_code == 4


def test_addresses_and_hosts_in_logs_get_aliases_that_stay_the_same():
    lines = [
        "[2026-11-30 21:11:27] gpu-host-7:14:94 [0] misc/socket.cc:72 NCCL WARN "
        "socketProgress: Connection closed by remote peer gpu-host-8.corp<40703>",
        "gpu-host-7:14:94 [0] NCCL WARN 10.1.2.3<5> and 10.1.2.3",
        "a line that nobody needs, with a password",
    ]
    out = list(anonymize_log(lines, Names()))
    assert len(out) == 2
    assert "gpu-host" not in "".join(out)
    assert out[1].count("address1") == 2
    assert all("host1" in line for line in out)


def test_a_dump_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Evil(), protocol=2))
    assert run("analyze", tmp_path).exit_code == 3
    assert run("anonymize", tmp_path, "--out", tmp_path / "copy").exit_code == 3
    assert not (tmp_path / "ran").exists()


def test_synth_makes_a_job_whose_fault_is_found_again(tmp_path):
    made = run("synth", tmp_path / "job", "--dp", 4, "--tp", 2, "--fault", "never_issued:5:2")
    assert (made.exit_code, made.stdout[:7]) == (0, "8 dumps")
    report = json.loads(run("analyze", tmp_path / "job", "--json").stdout)
    assert [c["rank"] for c in report["culprits"]] == [5]


def test_synth_without_a_fault_is_a_healthy_job(tmp_path):
    run("synth", tmp_path / "job", "--pp", 2, "--batched-p2p", "--json")
    assert run("analyze", tmp_path / "job").exit_code == 0


@pytest.mark.parametrize("fault", ["bogus:1", "died", "died:1:2:3:4", "died:9", "died:x"])
def test_synth_refuses_a_fault_that_cannot_be(tmp_path, fault):
    assert run("synth", tmp_path / "job", "--fault", fault).exit_code == 4


@pytest.mark.parametrize("name", real.NAMES)
def test_dumps_with_all_evidence_name_the_culprit_of_each_real_set(sets, tmp_path, name):
    one = real.real_sets()[name]
    logs_folder(tmp_path, name)
    for file, text in one["ras"].items():
        (tmp_path / file).write_text(text)
    result = run("analyze", sets / "nccl" / name / "dumps", tmp_path, "--json")
    culprits = [c["rank"] for c in json.loads(result.stdout)["culprits"]]
    assert culprits == ([] if one["culprit"] is None else [one["culprit"]])
    assert result.exit_code == (0 if one["culprit"] is None else 1)


def test_files_in_any_order_give_the_same_page_and_trace(sets, tmp_path):
    dumps = sorted((sets / "nccl" / "dp_tp_fault_in_tp" / "dumps").iterdir())
    made = set()
    for order in (dumps, dumps[::-1], dumps[1:] + dumps[:1]):
        run("analyze", *order, "--html", tmp_path / "a.html", "--perfetto", tmp_path / "a.gz")
        made.add(((tmp_path / "a.html").read_bytes(), (tmp_path / "a.gz").read_bytes()))
    assert len(made) == 1


def test_an_anonymous_copy_of_dumps_gives_the_same_verdict(sets, tmp_path):
    for name in ("skipped_call_same_shape", "order_inversion", "straggler", "healthy"):
        dumps, copy = sets / "nccl" / name / "dumps", tmp_path / name
        run("anonymize", dumps, "--out", copy)
        ours, theirs = (json.loads(run("analyze", d, "--json").stdout) for d in (dumps, copy))
        assert ours["verdict"] == theirs["verdict"]
        kept = ("rank", "kind", "seq", "op", "confidence")
        assert [[c[k] for k in kept] for c in ours["culprits"]] == [
            [c[k] for k in kept] for c in theirs["culprits"]
        ], name
