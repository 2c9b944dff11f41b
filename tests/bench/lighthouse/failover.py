"""How long until another lighthouse leads: `python -m tests.bench.lighthouse.failover [RUNS]`.

Three real lighthouses on a real three-node etcd (lease 2 s) or on a directory; the leader is
killed, stopped or told to go; each follower's /leaderz is asked every 5 ms.
"""

import http.client
import signal
import statistics
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack

from tests.lighthouse.lease.etcd_cluster import etcd_cluster
from tests.lighthouse.lighthouse_process import LighthouseProcess


def leads(lighthouse):
    connection = http.client.HTTPConnection(lighthouse.address, timeout=1)
    try:
        connection.request("GET", "/leaderz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def one(lease, number):
    with ExitStack() as stack:
        processes = []
        for _ in range(3):
            processes.append(LighthouseProcess("--lease", lease))
            stack.callback(processes[-1].stop)
        while not (leading := [p for p in processes if leads(p)]):
            time.sleep(0.05)
        leader = leading[0]
        others = [p for p in processes if p is not leader]
        time.sleep(1)
        started = time.perf_counter()
        leader.signal(number)
        while not any(leads(p) for p in others):
            time.sleep(0.005)
        return time.perf_counter() - started


def main():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as directory, etcd_cluster(directory) as etcd:
        endpoints = ",".join(etcd.endpoints)
        for kind in ("etcd", "file"):
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                fresh = uuid.uuid4()
                where = f"etcd:{endpoints}" if kind == "etcd" else f"file:{directory}"
                values = sorted(one(f"{where}/{fresh}", number) * 1000 for _ in range(runs))
                middle, least, most = statistics.median(values), values[0], values[-1]
                print(
                    f"{kind} {number.name}: {middle:.0f} ms, {least:.0f} to {most:.0f}", flush=True
                )


if __name__ == "__main__":
    main()
