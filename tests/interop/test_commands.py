"""`ckpt export` and `ckpt bench` as a user runs them."""

import json

import torch
from click.testing import CliRunner

from ckpt.__main__ import main
from tests.interop.conftest import save, trained


def run(*words):
    return CliRunner().invoke(main, [str(w) for w in words])


def test_export_writes_a_step_in_another_format(tmp_path):
    state = trained(1)
    save(state, tmp_path / "run", step=5)
    done = run("export", tmp_path / "run", tmp_path / "out", "--form", "torch", "--only", "model.")
    assert done.exit_code == 0 and "step 5 is in" in done.output
    loaded = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
    state["model"].load_state_dict(loaded["model"])
    assert loaded.keys() == {"model"}


def test_export_of_nothing_says_so_with_a_remedy(tmp_path):
    done = run("export", tmp_path, tmp_path / "out")
    assert done.exit_code == 1 and "no complete step" in done.output and "ckpt ls" in done.output


def test_bench_measures_a_store_and_leaves_nothing(tmp_path):
    done = run("bench", tmp_path, "--size-mb", 4, "--json")
    found = json.loads(done.output)
    assert found["conditional_put"] and [r["connections"] for r in found["rates"]] == [1, 4, 16]
    assert not list(tmp_path.iterdir())
    assert "CPU s per GB" in run("bench", tmp_path, "--size-mb", 4).output
