"""Several ranks: shared uploads, dead participants, and other world sizes. No collective saves."""

import pytest

from ckpt.listing import newest_first, read_manifest
from ckpt.stores import open_store
from tests.ckpt.ranks import run_ranks


@pytest.mark.parametrize(
    ("saved", "layout", "loaded", "other"),
    [
        (4, "rows", 2, "rows"),
        (2, "rows", 4, "2d"),
        (4, "2d", 1, "rows"),
        (4, "hsdp", 2, "columns"),
        (1, "rows", 4, "hsdp"),
    ],
)
def test_a_state_loads_in_any_other_world(tmp_path, saved, layout, loaded, other):
    run_ranks("save", saved, tmp_path, layout)
    run_ranks("load", loaded, tmp_path, other, "other")


def test_ranks_get_their_own_values_back(tmp_path):
    run_ranks("save", 2, tmp_path, "rows")
    run_ranks("load", 2, tmp_path, "rows", "same")


def test_replicas_share_the_upload(tmp_path):
    run_ranks("save", 4, tmp_path, "hsdp")
    manifest = read_manifest(open_store(str(tmp_path)), 1)
    logical = sum(p.nbytes for t in manifest.tensors.values() for p in t.pieces)
    assert manifest.stored_bytes < 1.2 * logical
    writers = {file.key.split("-")[1] for file in manifest.files}
    assert len(writers) == 4


def test_a_dead_replica_is_replaced_and_the_step_is_committed(tmp_path):
    results = run_ranks("one_dies", 2, tmp_path, check=False)
    assert results[0][0] == 0, results[0][1]
    assert newest_first(open_store(str(tmp_path))) == [2, 1]


def test_a_step_whose_only_holder_died_is_refused_with_the_reason(tmp_path):
    results = run_ranks("sole_holder_dies", 2, tmp_path, check=False)
    assert "REFUSED IncompleteSave" in results[0][1], results[0][1]
    assert newest_first(open_store(str(tmp_path))) == [1]


def test_pipeline_stages_keep_names_of_their_own(tmp_path):
    run_ranks("stages", 2, tmp_path)


def test_ranks_fall_back_together(tmp_path):
    run_ranks("damaged_for_one", 2, tmp_path)
