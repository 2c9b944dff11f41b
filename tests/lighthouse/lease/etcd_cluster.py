"""A real etcd cluster on loopback, whose members can be killed and stopped."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest


def require_etcd():
    if shutil.which("etcd") is None:
        assert not os.environ.get("CI"), "etcd is missing: apt-get install etcd-server"
        pytest.skip("etcd is not installed (Debian: etcd-server)")


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class EtcdCluster:
    def __init__(self, directory, size):
        ports = free_ports(2 * size)
        self.directory, self.names = directory, [f"m{i}" for i in range(size)]
        self.client = dict(zip(self.names, ports[:size], strict=True))
        self.peer = dict(zip(self.names, ports[size:], strict=True))
        self.processes = {}

    @property
    def endpoints(self):
        return [f"127.0.0.1:{self.client[name]}" for name in self.names]

    def start(self, name):
        peers = ",".join(f"{n}=http://127.0.0.1:{p}" for n, p in self.peer.items())
        client, peer = (f"http://127.0.0.1:{ports[name]}" for ports in (self.client, self.peer))
        command = ["etcd", "--name", name, "--data-dir", f"{self.directory}/{name}"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", peers, "--heartbeat-interval", "50"]
        command += ["--election-timeout", "500", "--logger", "zap"]
        with open(f"{self.directory}/{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def leader(self):
        """The name of the member that leads, asked of each member's own metrics page."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for name in self.names:
                if b"\netcd_server_is_leader 1\n" in self._page(name, "/metrics"):
                    return name
            time.sleep(0.02)
        raise AssertionError("the etcd cluster found no leader in 30 s")

    def _page(self, name, path):
        if self.processes[name].poll() is not None:
            return b""
        try:
            with socket.create_connection(("127.0.0.1", self.client[name]), timeout=1) as s:
                s.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                return b"".join(iter(lambda: s.recv(65536), b""))
        except OSError:
            return b""

    def signal(self, name, number):
        self.processes[name].send_signal(number)

    def stop(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def etcd_cluster(directory, size=3):
    require_etcd()
    cluster = EtcdCluster(directory, size)
    try:
        for name in cluster.names:
            cluster.start(name)
        cluster.leader()
        yield cluster
    finally:
        cluster.stop()
