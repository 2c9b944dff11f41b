"""Two levels: a digest a host, then merge. The verdict is that of the dumps, byte for byte."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import flightrec
from flightrec.__main__ import main
from flightrec.digest import MAGIC, unpack
from flightrec.errors import BadDump, NoDumps
from flightrec.loading import digest_of
from flightrec.sparse import Sparse
from flightrec.synth import synthesize, write_dumps
from tests.flightrec.test_sets import names

sys.path.insert(0, str(Path(__file__).parent))
from random_cases import random_case


def said(paths):
    return json.dumps(flightrec.analyze(flightrec.load(list(map(str, paths)))).to_json())


def digest(dumps, path):
    path.write_bytes(digest_of(list(map(str, dumps)))[0])
    return path


def split(files, folder):
    """Two digests and the rest as dumps: what a job with three hosts may send."""
    third = max(1, len(files) // 3)
    hosts = [files[:third], files[third : 2 * third]]
    folder.mkdir(exist_ok=True)
    digests = [digest(host, folder / f"host{i}") for i, host in enumerate(hosts) if host]
    return [*digests, *files[2 * third :]]


@pytest.mark.parametrize("archive, name", names("nccl") + names("gloo"))
def test_digests_and_dumps_mixed_say_the_same(sets, tmp_path, archive, name):
    files = sorted((sets / archive / name / "dumps").iterdir())
    assert said(split(files, tmp_path)) == said(files)


@pytest.mark.parametrize("seed", range(40))
def test_digests_of_random_jobs_say_the_same(tmp_path, seed):
    job, faults, options, rng = random_case(seed, healthy=seed % 5 == 0)
    write_dumps(str(tmp_path / "dumps"), synthesize(job, faults, **options))
    files = sorted((tmp_path / "dumps").iterdir())
    rng.shuffle(files)
    assert said(split(files, tmp_path / "digests")) == said(files)


def test_a_broken_dump_is_still_named_by_its_digest(sets, tmp_path):
    files = sorted((sets / "nccl" / "healthy" / "dumps").iterdir())
    (tmp_path / "rank_9").write_bytes(b"\x80\x02cos\nsystem\n.")
    files.append(tmp_path / "rank_9")
    assert said([digest(files, tmp_path / "all")]) == said(files)


def test_quorum_folders_are_told_apart_in_digests(sets, tmp_path):
    for quorum, name in ((1, "hang_missing_call"), (2, "healthy")):
        folder = tmp_path / f"fr_quorum_{quorum}"
        folder.mkdir()
        for file in (sets / "nccl" / name / "dumps").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    both = digest([tmp_path], tmp_path / "host.frdigest")
    assert flightrec.analyze(flightrec.load([str(both)])).verdict == "healthy"
    assert flightrec.analyze(flightrec.load([str(both)], quorum=1)).verdict == "fault"


def test_the_command_writes_one_small_file(sets, tmp_path):
    dumps = sets / "nccl" / "hang_missing_call" / "dumps"
    out = tmp_path / "host0.frdigest"
    ran = CliRunner().invoke(main, ["digest", str(dumps), "--out", str(out)])
    assert ran.exit_code == 0 and "4 dumps" in ran.output
    assert out.stat().st_size < sum(file.stat().st_size for file in dumps.iterdir())
    assert CliRunner().invoke(main, ["analyze", str(out)]).exit_code == 1


def test_nothing_to_digest_is_an_error(tmp_path):
    with pytest.raises(NoDumps):
        digest_of([str(tmp_path)])


@pytest.mark.parametrize("keep", [0, 1, 100, 1000])
def test_a_torn_digest_is_named(sets, tmp_path, keep):
    whole, _ = digest_of([str(sets / "nccl" / "healthy" / "dumps")])
    with pytest.raises(BadDump, match="torn or broken"):
        unpack(whole[: len(MAGIC) + keep], "host0")


def test_a_torn_digest_beside_good_dumps_is_a_finding(sets, tmp_path):
    files = sorted((sets / "nccl" / "hang_missing_call" / "dumps").iterdir())
    torn = digest(files, tmp_path / "host0")
    torn.write_bytes(torn.read_bytes()[:200])
    report = flightrec.analyze(flightrec.load([str(torn), *map(str, files)]))
    assert [c.rank for c in report.culprits] == [1]
    assert any("host0" in finding.text for finding in report.findings)


def test_a_sparse_column_looks_like_an_array():
    from array import array

    column = Sparse(6, array("I", [1, 4]), array("q", [10, 40]), 0)
    assert list(column) == [0, 10, 0, 0, 40, 0]
    assert column[-2] == 40 and column[1:3] == [10, 0]
    with pytest.raises(IndexError):
        column[6]
