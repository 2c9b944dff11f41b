"""What a user can get wrong: one clear sentence with the remedy, no traceback, nothing lost."""

import socket
import subprocess
import sys

import pytest
import torch

from ftcore import Manager
from ftcore.base.errors import BadSetting
from ftcore.errors import NothingToReduce
from tests.manager.jobs import HANG_S, Job


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
        ({"version": "0.0.9"}, "ftcore version is 0.0.9 here and"),
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
    options = {"failed_steps_max": 3, "guard": "never"}
    with Job(tmp_path, options=options) as job:
        text = refusal(job.start("r0"))
        assert "3 steps failed one after the other, the last because: never" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--journal", "/proc/nowhere/journal"], "/proc/nowhere/journal cannot be written"),
        (["--bind", "{used}"], "{used} cannot be listened on"),
        (["--bind", "everywhere"], "'everywhere' is not HOST:PORT"),
        (["--bind", "0.0.0.0:29510"], "plain text on 0.0.0.0 can be read by others"),
    ],
)
def test_a_lighthouse_that_cannot_start_says_why_and_what_to_do(arguments, words):
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        used = f"127.0.0.1:{occupied.getsockname()[1]}"
        command = [sys.executable, "-m", "lighthouse", "serve", "--bind", "127.0.0.1:0"]
        command += [argument.format(used=used) for argument in arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 1
    assert words.format(used=used) in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stderr.strip().endswith(".")  # the remedy is the last sentence


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
