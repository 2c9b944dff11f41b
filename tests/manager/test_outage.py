"""The only lighthouse is away for half a minute; two jobs train, and one of them loses a group."""

import time

from tests.manager.jobs import Job, together

OUTAGE_S = 30.0
STEP_S = 0.1


def commits(group):
    return [event["step"] for event in group.said("step.committed")]


def test_half_a_minute_without_a_lighthouse_stops_only_the_job_that_loses_a_group(tmp_path):
    with Job(tmp_path, step_time_s=STEP_S, steps=450) as job:
        calm = job.start_all("r0", "r1", "r2", options={"job": "calm"})
        hurt = job.start_all("r0", "r1", "r2", options={"job": "hurt"}, steps=100_000)
        together(*calm)
        together(*hurt)
        job.kill_lighthouse()
        away_since = time.time()
        hurt[1].kill()
        hurt[0].wait("step.failed")
        while time.time() < away_since + OUTAGE_S:
            calm[0].wait("step.committed")  # also the proof that it goes on
        back_at = time.time()
        job.restart_lighthouse()
        hurt[0].wait("step.committed", members=("r0", "r2"))
        assert len({group.finish() for group in calm}) == 1
        for group in calm:
            steps = commits(group)
            assert steps == list(range(steps[0], 450)), "a step was repeated or left out"
            assert not group.said("step.failed")
        meanwhile = [e for e in calm[0].said("step.committed") if away_since < e["at"] < back_at]
        assert len(meanwhile) > OUTAGE_S / STEP_S / 3, "it hardly trained"
        stopped = [e for e in hurt[0].said("step.committed") if away_since + 2 < e["at"] < back_at]
        assert not stopped, "it trained without a quorum"
