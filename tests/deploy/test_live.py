"""A real Prometheus scrapes a real job: every query of every dashboard panel has an answer."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

import pytest

from tests.deploy.processes import get
from tests.deploy.tools import DEPLOY, tool

DASHBOARDS = {p.stem: json.loads(p.read_text()) for p in (DEPLOY / "grafana").glob("*.json")}
LIVE = [
    (name, panel["title"], target["expr"])
    for name, board in sorted(DASHBOARDS.items())
    for panel in board["panels"]
    for target in panel["targets"]
]


def free_port():
    """Somebody else could take it before we do; then the stack says so and the test fails."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Stack:
    """`deploy/local.sh` as a user starts it, with three groups of which one is killed."""

    def __init__(self, folder):
        self.folder = folder
        ports = {"LIGHTHOUSE_PORT": free_port(), "PROMETHEUS_PORT": free_port()}
        self.lighthouse = f"http://127.0.0.1:{ports['LIGHTHOUSE_PORT']}"
        self.prometheus = f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}"
        env = {**os.environ, **{k: str(v) for k, v in ports.items()}, "FOLDER": str(folder)}
        env |= {"PYTHON": sys.executable, "PROMETHEUS": tool("prometheus"), "KILL_EVERY_S": "0"}
        self.process = subprocess.Popen(
            ["sh", str(DEPLOY / "local.sh")], env=env, stdout=subprocess.PIPE, text=True
        )
        self.words = self.process.stdout.readline()
        assert self.words.startswith("lighthouse "), self.words

    def job(self):
        return json.loads(get(f"{self.lighthouse}/status"))["jobs"].get("demo", {})

    def kill(self, name):
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def query(self, expr):
        """What a panel would show for all jobs."""
        expr = expr.replace("$job", ".+")
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        answer = json.loads(get(url))
        assert answer["status"] == "success", answer
        return [r for r in answer["data"]["result"] if r["value"][1] != "NaN"]

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def wait_for(condition, what, limit_s=180):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def interruptions(stack):
    found = json.loads(get(f"{stack.lighthouse}/interruptions")).get("demo", [])
    return [one["cause"] for one in found]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """A job that has been through a start, a loss and a return, seen twice by Prometheus since."""
    stack = Stack(tmp_path_factory.mktemp("stack"))
    try:
        wait_for(lambda: len(stack.job().get("members", ())) == 3, "three groups")
        exporter = checkpoint_exporter(stack)
        seen = 'ft_lighthouse_members{job="demo"} == 3'
        wait_for(lambda: stack.query(seen), "a scrape of three groups")
        stack.kill("r1")
        wait_for(lambda: "lost" in interruptions(stack), "the loss")
        scraped = 'ft:recovery_seconds:p50_6h{phase="total"} > 0'
        wait_for(lambda: stack.query(scraped), "the rules")
        wait_for(lambda: stack.query("ft_lighthouse_members == 2"), "a scrape of two groups")
        wait_for(lambda: stack.query("ft:steps_repeated:increase1h"), "the rules")
        if exporter is not None:
            move(exporter)
            wait_for(lambda: stack.query("ft:ckpt_overhead:ratio_rate1h > 0"), "the checkpoints")
        yield stack
    finally:
        stack.stop()


def checkpoint_exporter(stack):
    """The exporter of the checkpoint daemon with one durable save in it, or None without ckpt."""
    try:
        from ckpt.daemon.metrics import Metrics, serve
    except ImportError:
        return None
    metrics = Metrics()
    metrics.failed("file:///c", "StoreTimeout")
    move(metrics)
    server = serve(metrics, address=("127.0.0.1", 0))
    target = f"127.0.0.1:{server.server_address[1]}"
    text = json.dumps([{"targets": [target], "labels": {"job": "demo"}}])
    (stack.folder / "checkpoint.targets.json").write_text(text)
    wait_for(lambda: stack.query("ft_ckpt_durable_step"), "the daemon's metrics")
    return metrics


def move(metrics):
    """What the daemon and its trainer count for one more save."""
    metrics.observe("write", "file:///c", 1 << 20, 0.5)
    metrics.durable("file:///c", 10, 1 << 20, 0.7, time.time())
    metrics.set("ft_ckpt_memory_bytes", 1 << 21)
    metrics.add("ft_ckpt_staging_seconds_total", 0.1)
    metrics.add("ft_ckpt_staging_bytes_total", 1 << 20)
    metrics.add("ft_ckpt_lost_seconds_total", 0.1)


@pytest.mark.parametrize(("board", "panel", "expr"), LIVE)
def test_every_query_of_every_panel_returns_data(stack, board, panel, expr):
    if board == "checkpoints":
        pytest.importorskip("ckpt.daemon.metrics")
    assert stack.query(expr), f"{panel} shows nothing: {expr}"


def test_the_numbers_are_those_of_the_lighthouse(stack):
    (members,) = stack.query("max by (job) (ft_lighthouse_members)")
    assert members["metric"] == {"job": "demo"} and members["value"][1] == "2"
    (lost,) = stack.query('ft_lighthouse_interruptions_total{cause="lost"}')
    assert lost["value"][1] == "1"
    (ettr,) = stack.query("ft_lighthouse_goodput_ratio")
    assert 0 < float(ettr["value"][1]) < 1


def test_phases_were_measured_on_both_sides(stack):
    record = json.loads(get(f"{stack.lighthouse}/interruptions"))["demo"][-1]
    assert record["cause"] == "lost" and record["who"] == ["r1"]
    phases = record["phases"]
    assert phases["group_s"] > 0 and phases["quorum_s"] > 0 and phases["first_step_s"] > 0
    assert sum(phases.values()) == pytest.approx(record["stopped_s"], abs=1e-4)


def test_no_alert_fires_for_a_job_that_recovered(stack):
    assert not stack.query('ALERTS{alertstate="firing"}')


def test_prometheus_accepts_what_the_lighthouse_exports(stack):
    text = get(f"{stack.lighthouse}/metrics")
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_table_of_metrics_is_complete_and_true(stack):
    table = (DEPLOY / "METRICS.md").read_text().partition("## The checkpoint daemon")[0]
    written = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `ft_")}
    exported = {
        line.split()[2]
        for line in get(f"{stack.lighthouse}/metrics").splitlines()
        if "# TYPE" in line
    }
    assert written == exported


def test_nothing_is_left_running(tmp_path):
    stack = Stack(tmp_path)
    wait_for(lambda: list(tmp_path.glob("r2.pid")), "the groups")
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    stack.stop()
    wait_for(lambda: not any(map(is_running, pids)), "the end of all groups", limit_s=10)


def is_running(pid):
    """Whether it lives; what only waits for its parent to look does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_missing_program_is_named_with_its_remedy():
    env = {**os.environ, "PROMETHEUS": "prometheus-that-is-not-there"}
    done = subprocess.run(
        ["sh", str(DEPLOY / "local.sh")], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1 and "apt-get install prometheus" in done.stderr
