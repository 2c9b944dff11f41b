"""Random jobs: a random fault names its rank, a healthy job says nothing."""

import pickle
import sys
from pathlib import Path

import pytest

import flightrec
from flightrec.model import Verdict
from flightrec.synth import synthesize, write_dumps

sys.path.insert(0, str(Path(__file__).parent))
from random_cases import random_case

CASES = 60


def report_of(dumps, folder):
    write_dumps(str(folder), dumps)
    return flightrec.analyze(flightrec.load([str(folder)]))


def test_random_faults_name_the_guilty(tmp_path):
    named = right = first = 0
    for seed in range(CASES):
        job, faults, options, _ = random_case(seed)
        report = report_of(synthesize(job, faults, **options), tmp_path / str(seed))
        guilty = {fault.rank for fault in faults}
        named += len(report.culprits)
        right += sum(1 for culprit in report.culprits if culprit.rank in guilty)
        first += bool(report.culprits) and report.culprits[0].rank in guilty
    assert right >= 0.95 * named and first >= 0.95 * CASES, (named, right, first)


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_random_healthy_jobs_are_silent(tmp_path, seed):
    job, _, options, _ = random_case(seed, healthy=True)
    report = report_of(synthesize(job, **options), tmp_path)
    assert report.verdict is Verdict.HEALTHY, report


def test_the_same_job_makes_the_same_dumps():
    job, faults, options, _ = random_case(5)
    once, again = (pickle.dumps(synthesize(job, faults, **options)) for _ in range(2))
    assert once == again
