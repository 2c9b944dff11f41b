"""Real candidates as processes, killed and stopped, over a directory and over a real etcd."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.lighthouse.lease.etcd_cluster import etcd_cluster

ROOT = Path(__file__).parents[3]


class CandidateProcess:
    """Runs candidate_process.py and collects what it says."""

    def __init__(self, lease, name):
        command = [sys.executable, "-m", "tests.lighthouse.lease.candidate_process", lease, name]
        self.name = name
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
        self.said, self.heard = queue.Queue(), []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def wait(self, what, **facts):
        """The next thing said that is `what` with these facts."""
        while True:
            line = self.said.get(timeout=60)
            self.heard.append(line)
            if line["what"] == what and facts.items() <= line.items():
                return line

    def signal(self, number):
        os.kill(self.process.pid, number)

    def stop(self):
        self.signal(signal.SIGCONT) if self.process.poll() is None else None
        self.process.kill()
        self.process.wait()


@contextmanager
def pair(lease_text):
    """A leader that has written, and a follower that knows it."""
    with ExitStack() as stack:
        leader = CandidateProcess(lease_text, "a:1")
        stack.callback(leader.stop)
        leader.wait("wrote")
        follower = CandidateProcess(lease_text, "b:2")
        stack.callback(follower.stop)
        follower.wait("holder", address="a:1")
        yield leader, follower


def test_a_killed_leader_is_followed_by_one_that_knows_its_last_write(lease_text):
    with pair(lease_text) as (leader, follower):
        written = leader.wait("wrote")
        leader.signal(signal.SIGKILL)
        won = follower.wait("leads")
        assert won["term"] > written["term"]
        assert won["count"] >= written["count"]


def test_a_stopped_leader_wakes_up_deposed_and_writes_nothing(lease_text):
    with pair(lease_text) as (leader, follower):
        old_term = leader.wait("wrote")["term"]
        leader.signal(signal.SIGSTOP)
        won = follower.wait("leads")
        follower.wait("wrote")
        leader.signal(signal.SIGCONT)
        leader.wait("holder", address="b:2")
        written = [line["count"] for line in leader.heard if line["what"] == "wrote"]
        assert won["term"] > old_term
        assert max(written) <= won["count"], "written after the next one had read the records"


def test_a_terminated_leader_hands_over_at_once(lease_text):
    with pair(lease_text) as (leader, follower):
        leader.signal(signal.SIGTERM)
        leader.wait("ended")
        follower.wait("leads")
        assert leader.process.wait(timeout=60) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_when_the_etcd_leader_is_lost_someone_leads_again_and_no_write_is_lost(tmp_path, number):
    with etcd_cluster(tmp_path) as etcd, pair("etcd:" + ",".join(etcd.endpoints)) as both:
        written = both[0].wait("wrote")["count"]
        etcd.signal(etcd.leader(), number)
        later = wait_any(both, "wrote", after=written + 20)
        counts = [line["count"] for p in both for line in p.heard if line["what"] == "wrote"]
        assert later["count"] > written
        assert len(counts) == len(set(counts)), "two leaders wrote the same number"


def wait_any(processes, what, *, after):
    """The first process that gets beyond the number `after`."""
    while True:
        for process in processes:
            try:
                line = process.said.get(timeout=0.05)
            except queue.Empty:
                continue
            process.heard.append(line)
            if line["what"] == what and line["count"] > after:
                return line
