"""Heals through the real manager: who heals from whom is seen, and sources and joiners may die."""

import time

import pytest

from lighthouse.commands import Client, status_text
from tests.manager.jobs import HANG_S, Job, together

# 400,000 hidden units are 48 MB of parameters and Adam's state; each source gives 20 MB a second
SLOW = {
    "width": 400_000,
    "step_time_s": 0.05,
    "options": {"heal_bandwidth_max": 2e7, "detect_within_s": 1.0},
}


@pytest.fixture
def job(tmp_path):
    with Job(tmp_path, replicas_min=1, **SLOW) as job:
        yield job


def status_when(job, condition):
    """The lighthouse's status once `condition(groups)` holds."""
    client = Client(job.lighthouse.address, ca="", token="")
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        status = client.leader_status()
        if condition(status["jobs"]["default"]["groups"]):
            return status
        time.sleep(0.02)
    raise AssertionError(f"it never came to that; the last status was {status}")


def is_under_way(name):
    """True for a status in which a part of the group's heal has come."""
    return lambda groups: bool((groups.get(name, {}).get("heal") or {}).get("bytes_done"))


def test_the_lighthouse_shows_who_heals_from_whom_and_how_far(job):
    r0, r1 = job.start_all("r0", "r1")
    together(r0, r1)
    r2 = job.start("r2")
    status = status_when(job, is_under_way("r2"))
    heal = status["jobs"]["default"]["groups"]["r2"]["heal"]
    assert heal["sources"] == ["r0", "r1"]
    assert 0 < heal["bytes_done"] <= heal["bytes_total"]
    assert "healing" in status_text(status) and "from r0, r1: " in status_text(status)
    status = status_when(job, lambda groups: groups["r2"]["state"] == "member")
    assert status["jobs"]["default"]["groups"]["r2"]["heal"] is None
    together(r0, r1, r2)
    assert r2.said("heal.finished")


def test_both_sources_serve_a_joiner(job):
    r0, r1 = job.start_all("r0", "r1")
    together(r0, r1)
    healed = job.start("r2").wait("heal.finished")
    assert len(healed["by_source"]) == 2 and all(healed["by_source"].values())


def test_when_a_source_is_killed_in_mid_heal_another_one_goes_on_where_it_ended(job):
    r0, r1 = job.start_all("r0", "r1", steps=60)
    together(r0, r1)
    r2 = job.start("r2", steps=60)
    status_when(job, is_under_way("r2"))
    r0.kill()
    healed = r2.wait("heal.finished")
    assert healed["resumed_bytes"] > 0 and len(healed["by_source"]) == 1
    assert r1.finish() == r2.finish()


def test_when_the_joiner_is_killed_in_mid_heal_the_others_go_on_and_the_next_one_heals(job):
    r0, r1 = job.start_all("r0", "r1", steps=60)
    together(r0, r1)
    first = job.start("r2", steps=60)
    status_when(job, is_under_way("r2"))
    first.kill()
    r0.wait("step.committed", members=("r0", "r1"))
    second = job.start("r2", steps=60)
    assert r0.finish() == r1.finish() == second.finish()
    assert second.said("heal.finished")


def test_two_joiners_heal_at_once_and_one_dies(job):
    (r0,) = job.start_all("r0", steps=60)
    r0.wait("step.committed", members=("r0",))
    r1, r2 = job.start_all("r1", "r2", steps=60)
    status_when(job, lambda groups: is_under_way("r1")(groups) or is_under_way("r2")(groups))
    r1.kill()
    assert r0.finish() == r2.finish()
