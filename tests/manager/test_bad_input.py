"""What a user can get wrong: one clear sentence with the remedy, no traceback, nothing lost."""

import pytest
import torch

from ftcore import Manager
from ftcore.base.errors import BadSetting
from ftcore.errors import NothingToReduce
from tests.manager.jobs import Job


def refusal(group):
    error = group.wait("error")
    assert error["remedy"].endswith(".")
    return error["what"] + " " + error["remedy"]


def test_an_unreachable_lighthouse(tmp_path):
    with Job(tmp_path) as job:
        job.kill_lighthouse()
        group = job.start("r0", options={"attach_timeout_s": 1.0})
        text = refusal(group)
        assert "no lighthouse answered at 127.0.0.1" in text and "FTCORE_LIGHTHOUSE" in text


def test_two_groups_with_one_name(tmp_path):
    with Job(tmp_path, step_time_s=0.05) as job:
        first = job.start("r0")
        first.wait("step.committed")
        assert "'r0' is in use by another living group" in refusal(job.start("r0"))
        first.finish()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"shards": 4}, "shards is 4 here and 3 in the other replica groups"),
        ({"mode": "fast"}, "mode is fast here and exact"),
        ({"options": {"seed": 5}}, "seed is 5 here and 0"),
    ],
)
def test_groups_that_do_not_agree(tmp_path, config, words):
    with Job(tmp_path, step_time_s=0.05) as job:
        first = job.start("r0")
        first.wait("step.committed")
        assert words in refusal(job.start("r1", **config))
        first.finish()


def test_another_model_is_refused_and_the_first_difference_named(tmp_path):
    with Job(tmp_path, step_time_s=0.05) as job:
        first = job.start("r0")
        first.wait("step.committed")
        text = refusal(job.start("r1", width=32))
        assert "0.weight" in text and "[32, 8]" in text and "[16, 8]" in text
        first.finish()


def test_a_group_that_always_fails_stops_with_the_reason(tmp_path):
    """Its peer is stopped from outside in each step, and only the collective's limit ends it."""
    options = {"failed_steps_max": 3, "guard": "never"}
    with Job(tmp_path, options=options) as job:
        text = refusal(job.start("r0"))
        assert "3 steps failed one after the other, the last because: never" in text


def construct(**options):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Manager(model, optimizer, **{"shards": 2, "lighthouse": "127.0.0.1:1", **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": 0, "replica_id": "r0"}, "shards is 0"),
        ({"mode": "quick", "replica_id": "r0"}, "mode is 'quick'"),
        ({}, "this replica group has no name"),
        ({"lighthouse": "nowhere", "replica_id": "r0"}, "is not HOST:PORT"),
        ({"lighthouse": "h:99999", "replica_id": "r0"}, "is not HOST:PORT"),
    ],
)
def test_arguments_that_cannot_work(options, words):
    with pytest.raises(BadSetting) as failure:
        construct(**options)
    assert words in str(failure.value)
    assert failure.value.remedy


def test_a_model_without_gradients():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(NothingToReduce):
        Manager(model, torch.optim.SGD([torch.zeros(1)], lr=1.0), shards=1)
