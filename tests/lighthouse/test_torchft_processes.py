"""torchft's manager servers, each in a process of its own, against real lighthouses."""

import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest

from tests.lighthouse.lighthouse_process import LighthouseProcess

torchft = pytest.importorskip("torchft._torchft")
MANAGER = """
import sys, time
from datetime import timedelta
from torchft._torchft import ManagerServer
second = timedelta(seconds=1)
server = ManagerServer(
    replica_id=sys.argv[1], lighthouse_addr=sys.argv[2], hostname="127.0.0.1", bind="127.0.0.1:0",
    store_addr="127.0.0.1:1", world_size=1, heartbeat_interval=second / 10,
    connect_timeout=10 * second, quorum_retries=0,
)
print(server.address(), flush=True)
time.sleep(600)
"""
OPTIONS = ("--torchft-heartbeat-timeout", "1", "--min-replicas", "1", "--torchft-join-timeout", "5")


class Manager:
    def __init__(self, replica_id, address):
        command = [sys.executable, "-c", MANAGER, replica_id, f"http://{address}"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.address = self.process.stdout.readline().strip()
        self.client = torchft.ManagerClient(self.address, timedelta(seconds=10))

    def quorum(self, step):
        return self.client._quorum(
            group_rank=0,
            step=step,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=40),
            init_sync=True,
            commit_failures=0,
        )

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def stopping(*things):
    try:
        yield things
    finally:
        for thing in things:
            thing.stop()


def step(managers, number):
    """All ask together, again until they are all in one quorum."""
    with ThreadPoolExecutor(len(managers)) as pool:
        while True:
            answers = list(pool.map(lambda m: m.quorum(number), managers))
            if all(a.replica_world_size == len(managers) for a in answers):
                return answers


def test_torchft_groups_connected_to_a_follower_never_notice_that_the_leader_died(tmp_path):
    lease = f"file:{tmp_path / 'lease'}"
    with stopping(*(LighthouseProcess("--lease", lease, *OPTIONS) for _ in range(2))) as both:
        leader = next(p for p in both if p.status()["role"] == "leader")
        follower = next(p for p in both if p is not leader)
        names = ("a:1", "b:1")
        with stopping(*(Manager(name, follower.address) for name in names)) as managers:
            before = step(managers, 0)[0].quorum_id
            leader.signal(signal.SIGKILL)
            answers = step(managers, 1)
            assert answers[0].quorum_id >> 32 > before >> 32
            assert {m["replica_id"] for m in follower.status()["torchft"]["members"]} == set(names)


def test_a_killed_torchft_group_is_left_out_and_heals_when_it_comes_back():
    with stopping(LighthouseProcess(*OPTIONS)) as (lighthouse,):
        a, b = Manager("a:1", lighthouse.address), Manager("b:1", lighthouse.address)
        with stopping(a, b):
            first = step([a, b], 0)[0].quorum_id
            b.process.kill()
            alone = a.quorum(1)
            assert (alone.replica_world_size, alone.quorum_id) == (1, first + 1)
            with stopping(Manager("b:2", lighthouse.address)) as (again,):
                with ThreadPoolExecutor(2) as pool:
                    asking = pool.submit(again.quorum, 0)
                    survivor = a.quorum(2)
                    while survivor.replica_world_size < 2:
                        survivor = a.quorum(2)
                    healed = asking.result()
                assert healed.heal and healed.max_step == 2
                assert healed.recover_src_manager_address == a.address
                assert survivor.quorum_id > alone.quorum_id


def test_the_kill_path_makes_torchfts_manager_exit():
    with stopping(LighthouseProcess(*OPTIONS)) as (lighthouse,):
        manager = Manager("a:1", lighthouse.address)
        with stopping(manager):
            step([manager], 0)
            url = f"http://{lighthouse.address}/replica/a:1/kill"
            with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST")) as answer:
                assert answer.read() == b"killed\n"
            assert manager.process.wait(timeout=30) != 0
