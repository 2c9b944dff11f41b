"""Gradients reduced across two replica groups of two ranks, for every inner parallelism."""

import pytest

from tests.reduce.parallel.cases import CASES
from tests.reduce.parallel.cluster import run_everywhere


@pytest.fixture(scope="module")
def outcomes():
    return run_everywhere(CASES)


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_the_gradients_are_those_of_one_process(outcomes, name):
    assert not outcomes[name], "\n".join(outcomes[name])
