"""The command line, on a directory with two steps."""

import json

import pytest
from click.testing import CliRunner

from ckpt.__main__ import main
from tests.ckpt.test_integrity import flip


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.output


def test_ls_lists_complete_steps(run):
    assert [line.split()[0] for line in call("ls", run.path).splitlines()] == ["1", "2"]
    steps = json.loads(call("ls", run.path, "--json"))["steps"]
    assert [s["step"] for s in steps] == [1, 2] and steps[0]["tensors"] == 16


def test_show_names_tensors_types_and_values(run):
    output = call("show", run.path, "--step", 1)
    assert "model.0.weight  float32  32x32" in output and "epoch" in output


def test_verify_finds_a_flipped_bit_and_names_the_file(run):
    assert "good" in call("verify", run.path, "--deep", "--all")
    flip(run.files(2)[0], 40_000)
    assert "good" in call("verify", run.path)  # sizes are right, so only --deep can know
    output = call("verify", run.path, "--deep", "--all", code=1)
    assert "step 1: good" in output and run.files(2)[0].name in output


def test_diff_names_tensors_and_the_largest_difference(run):
    assert "all tensors are equal" in call("diff", run.path, run.path)
    output = call("diff", run.path, run.path, "--step-a", 1, "--step-b", 2, code=1)
    assert "model.0.weight: values" in output and "by at most" in output


def test_copy_takes_a_step_elsewhere(run, tmp_path):
    call("copy", run.path, tmp_path / "other", "--step", 1)
    assert "step 1: good" in call("verify", tmp_path / "other", "--deep")


def test_a_damaged_step_is_not_copied(run, tmp_path):
    flip(run.files(2)[0], 40_000)
    call("copy", run.path, tmp_path / "other", code=1)
    assert "no complete step" in call("ls", tmp_path / "other")


def test_prune_shows_its_plan_and_deletes_only_when_told(run):
    assert "steps to delete: 1" in call("prune", run.path, "--keep-last", 1)
    assert run.manifest(1).exists()
    call("prune", run.path, "--keep-last", 1, "--yes")
    assert not run.manifest(1).parent.exists() and run.manifest(2).exists()


def test_a_pinned_step_survives_pruning(run):
    call("pin", run.path, 1)
    assert "steps to delete: none" in call("prune", run.path, "--keep-last", 1)


def test_prune_removes_leftovers_and_no_step(run):
    run.manifest(1).unlink()
    call("prune", run.path, "--leftovers-older-s", 0, "--yes")
    assert not run.manifest(1).parent.exists() and run.manifest(2).exists()


@pytest.mark.parametrize("command", ["show", "verify"])
def test_an_empty_place_is_said_to_be_empty(tmp_path, command):
    output = call(command, tmp_path / "nothing", code=1)
    assert "no complete step" in output and "ckpt" in output


def test_a_step_that_is_not_there_is_not_called_damaged(run):
    output = call("verify", run.path, "--step", 5, code=1)
    assert "step 5" in output and "no manifest" in output and "DAMAGED" not in output


def test_daemon_stop_without_a_daemon(runtime):
    assert "no daemon" in call("daemon", "--stop")
