"""The real sets in other forms: the same verdict while the truth is kept, nobody else accused."""

import json
import pickle
from functools import partial

import pytest

import flightrec
from tests.flightrec import variants
from tests.flightrec.test_sets import names, truth_of

NCCL = [name for _, name in names("nccl")]
SPAN = 70_000  # by which `variants.shifted` moves numbers
SILENT = {("type_mismatch", "only active")}  # the mismatch completed: what is left hides it


def found(folder):
    report = flightrec.analyze(flightrec.load([str(folder)]))
    return [(c.rank, c.kind, (c.seq or 0) % SPAN) for c in report.culprits]


@pytest.fixture(params=NCCL)
def case(request, sets):
    return sets / "nccl" / request.param


@pytest.mark.parametrize("change", variants.SAME_TRUTH)
def test_another_writer_gives_the_same_verdict(case, tmp_path, change):
    dumps = variants.each(variants.load(case), variants.SAME_TRUTH[change])
    assert found(variants.written(dumps, tmp_path / "out")) == found(case / "dumps")


@pytest.mark.parametrize("name", variants.NAMES.values())
def test_another_name_gives_the_same_verdict(case, tmp_path, name):
    written = variants.written(variants.load(case), tmp_path / "out", name=name)
    assert found(written) == found(case / "dumps")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_dumps_that_python_wrote_again_give_the_same_verdict(case, tmp_path, protocol):
    how = partial(pickle.dumps, protocol=protocol)
    written = variants.written(variants.load(case), tmp_path / "out", how=how)
    assert found(written) == found(case / "dumps")


def test_json_gives_the_same_verdict(case, tmp_path):
    written = variants.written(
        variants.load(case), tmp_path / "out", name="rank_{}.json", how=json.dumps
    )
    assert found(written) == found(case / "dumps")


@pytest.mark.parametrize("change", variants.LESS_EVIDENCE)
def test_less_evidence_never_accuses_the_innocent(case, tmp_path, change):
    dumps = variants.each(variants.load(case), variants.LESS_EVIDENCE[change])
    named = {rank for rank, *_ in found(variants.written(dumps, tmp_path / "out"))}
    if (case.name, change) not in SILENT:
        assert named <= set(truth_of(case)[0])


def test_a_lost_dump_of_an_innocent_rank_accuses_nobody_else(case, tmp_path):
    dumps, guilty = variants.load(case), set(truth_of(case)[0])
    for lost in set(dumps) - guilty if len(dumps) > 3 else ():
        rest = {rank: dump for rank, dump in dumps.items() if rank != lost}
        named = {rank for rank, *_ in found(variants.written(rest, tmp_path / str(lost)))}
        assert named <= guilty, f"without rank {lost}"
