"""Slurm, systemd and the container image: checked as far as they can be without a cluster.

No Slurm controller, no systemd and no container engine run here. The batch script itself does run:
with stand-ins for srun and scontrol, real replica groups and a real lighthouse.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest

from tests.deploy.processes import LighthouseProcess
from tests.deploy.tools import DEPLOY, ROOT, run, tool

SCRIPTS = [*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch"), *(ROOT / "tests/deploy").glob("*.sh")]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CONTAINER = DEPLOY / "container"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(path):
    run(tool("shellcheck"), path)


# The options that are used in deploy/


def options_of(*command):
    done = run(sys.executable, "-m", *command, "--help", cwd=ROOT)
    return set(re.findall(r"--[a-z][a-z0-9-]+", done.stdout))


def test_every_option_of_the_lighthouse_exists():
    known = options_of("lighthouse", "serve")
    chart = (DEPLOY / "helm/lighthouse/templates/statefulset.yaml").read_text()
    used = set(re.findall(r"- (--[a-z-]+)", chart))
    batch = (DEPLOY / "slurm/lighthouse.sbatch").read_text()
    used |= set(re.findall(r"--[a-z][a-z-]+", batch.partition("set -euo")[2]))
    unit = (DEPLOY / "systemd/ftcore-lighthouse.service").read_text()
    used |= set(re.findall(r"--[a-z][a-z-]+", unit))
    local = (DEPLOY / "local.sh").read_text()
    for call in re.findall(r"lighthouse serve((?:.*\\\n)*.*)", local):
        used |= set(re.findall(r"--[a-z][a-z-]+", call))
    assert {"--bind", "--lease", "--tls-cert", "--journal"} <= used
    assert used <= known, f"`lighthouse serve` does not know {used - known}"


def test_every_option_of_the_checkpoint_daemon_exists():
    if not (ROOT / "ckpt/daemon/__main__.py").exists():
        pytest.skip("the checkpoint daemon is not here yet")
    known = options_of("ckpt.daemon")
    pod = (DEPLOY / "helm/training-job/templates/_pod.tpl").read_text()
    used = set(re.findall(r"- (--[a-z-]+)=\{\{ \$v.checkpoint", pod))
    unit = (DEPLOY / "systemd/ftcore-ckpt@.service").read_text()
    used |= set(re.findall(r"--[a-z][a-z-]+", unit))
    assert used and used <= known, f"the daemon does not know {used - known}"


def test_probes_and_scrapes_ask_for_pages_that_exist():
    tree = ast.parse((ROOT / "lighthouse/web.py").read_text())
    pages = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    asked = set()
    for path in (DEPLOY / "helm/lighthouse").rglob("*.yaml"):
        asked |= set(re.findall(r'[" ](/\w+)(?:"|$)', path.read_text(), re.M))
    assert asked == {"/healthz", "/readyz", "/leaderz", "/metrics"} <= pages


def test_every_variable_that_is_set_is_read_by_somebody():
    names = set()
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix in (".tpl", ".sh", ".sbatch", ".service", ".md"):
            names |= set(re.findall(r"\b(?:FTCORE|CKPT|LIGHTHOUSE)_[A-Z_]+\b", path.read_text()))
    own = {"LIGHTHOUSE_PORT", "LIGHTHOUSE_OPTIONS"}  # of the scripts and units themselves
    code = "".join(
        p.read_text() for d in ("ftcore", "lighthouse", "ckpt") for p in (ROOT / d).rglob("*.py")
    )
    unknown = {name for name in names - own if f'"{name}"' not in code}
    assert not unknown and {"FTCORE_TLS_CA", "FTCORE_TOKEN_FILE", "CKPT_RUNTIME_DIR"} <= names


# Slurm

STAND_INS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "torchrun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$PYTHON" "$@"',
    "scontrol": '[ "$1" = show ] && echo localhost || echo "$@" >>"$SCONTROL_LOG"',
}


class BatchJob:
    """One element of the array, run the way slurmd would, without Slurm."""

    def __init__(self, folder, lighthouse, element, **env):
        for name, text in STAND_INS.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        self.calls = folder / f"scontrol-{element}.log"
        self.log = folder / f"batch-{element}.log"
        env = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SCONTROL_LOG": str(self.calls),
            "FTCORE_LIGHTHOUSE": lighthouse,
            "FTCORE_HOST": "127.0.0.1",
            "SLURM_JOB_NAME": "llm",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": str(element),
            "SLURM_JOB_ID": str(70 + element),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_NUM_NODES": "1",
            "OMP_NUM_THREADS": "1",
            **env,
        }
        command = ["bash", str(DEPLOY / "slurm/train.sbatch"), str(DEPLOY / "example/train.py")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def told(self):
        return self.calls.read_text() if self.calls.exists() else ""

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def lighthouse(tmp_path):
    process = LighthouseProcess("--journal", str(tmp_path / "journal"))
    yield process
    process.stop()


@pytest.fixture
def batch(tmp_path, lighthouse):
    jobs = []

    def start(element, **env):
        jobs.append(BatchJob(tmp_path, lighthouse.address, element, **env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def wait_for(condition, what, limit_s=120):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_group_that_is_told_leaves_in_good_order_and_is_requeued(batch, lighthouse):
    first, second = (batch(n, STEP_S="0.05", STEPS="100000") for n in (0, 1))

    def both_train():
        job = lighthouse.status()["jobs"].get("llm-7", {})
        groups = job.get("groups", {}).values()
        return len(job.get("members", ())) == 2 and min(g["committed"] for g in groups) > 3

    wait_for(both_train, first.log.read_text() if first.log.exists() else "")
    before = lighthouse.status()["jobs"]["llm-7"]
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=60) == 0, second.log.read_text()
    assert "drained: " in second.log.read_text()
    assert second.told() == "requeue 71\n"

    def others_went_on():
        job = lighthouse.status()["jobs"]["llm-7"]
        return job["members"] == ["group-0"] and job["steps_committed"] > (
            before["steps_committed"] + 10
        )

    wait_for(others_went_on, first.log.read_text())
    after = lighthouse.status()["jobs"]["llm-7"]
    assert after["steps_repeated"] == before["steps_repeated"], lighthouse.get("/interruptions")
    assert not first.told()


def test_a_group_that_crashes_is_requeued_and_one_that_always_crashes_is_not(batch):
    crashed, hopeless = batch(0, SHARDS="0"), batch(1, SHARDS="0", RESTARTS_MAX="0")
    assert crashed.process.wait(timeout=120) == 0 and crashed.told() == "requeue 70\n"
    assert hopeless.process.wait(timeout=120) == 1 and not hopeless.told()


# systemd


def unit_with_programs_of_this_machine(unit, folder):
    """The same unit, with programs that are there: those in /opt/ftcore are not."""
    text = re.sub(r"/opt/ftcore/bin/\w+", "/bin/true", unit.read_text())
    copy = folder / unit.name.replace("@.", "@root.")
    copy.write_text(text)
    return copy


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_systemd_understands_the_unit(unit, tmp_path):
    copy = unit_with_programs_of_this_machine(unit, tmp_path)
    done = run(tool("systemd-analyze"), "verify", "--man=no", copy)
    assert done.stderr == ""


def test_a_setting_that_systemd_does_not_know_is_noticed(tmp_path):
    copy = unit_with_programs_of_this_machine(UNITS[-1], tmp_path)
    copy.write_text(copy.read_text().replace("[Install]", "ProtectEverything=yes\n[Install]"))
    done = run(tool("systemd-analyze"), "verify", "--man=no", copy, check=False)
    assert "ProtectEverything" in done.stderr


def test_the_lighthouse_unit_gives_almost_nothing_away():
    unit = DEPLOY / "systemd/ftcore-lighthouse.service"
    run(tool("systemd-analyze"), "security", "--offline=true", "--threshold=15", unit)


# The container image


def test_hadolint_finds_nothing():
    run(tool("hadolint"), CONTAINER / "Containerfile")


def test_the_image_runs_as_nobody_and_carries_no_torch():
    stages = (CONTAINER / "Containerfile").read_text().split("\nFROM ")
    assert len(stages) == 3 and "\nUSER 65532:65532" in stages[-1]
    wanted = (CONTAINER / "lighthouse.requirements.txt").read_text()
    assert "torch" not in re.sub(r"#.*", "", wanted)


def test_the_requirements_of_the_image_are_all_that_the_lighthouse_needs():
    """Import all of it and see which distributions were used."""
    code = """
import importlib, importlib.metadata as m, json, pkgutil, sys, lighthouse.__main__
for found in pkgutil.walk_packages(lighthouse.__path__, "lighthouse."):
    importlib.import_module(found.name)
owners = m.packages_distributions()
names = {name.partition(".")[0] for name in sys.modules} & set(owners)
print(json.dumps([owners[name] for name in names]))
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    lines = (CONTAINER / "lighthouse.requirements.txt").read_text().splitlines()
    wanted = closure({distribution(line) for line in lines if line and line[0] != "#"})
    used = json.loads(run(sys.executable, "-c", code, cwd=ROOT).stdout)
    for owners in used:  # several, when they share a namespace such as `google`
        assert {distribution(o) for o in owners} & (wanted | OPTIONAL), owners


OPTIONAL = {"ftcore", "setuptools", "grpcio-tools", "opentelemetry-api"}  # used when they are there


def distribution(requirement):
    return re.sub("[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def closure(names):
    """These distributions and all that they require here."""
    wanted, todo = set(), set(names)
    while todo:
        name = todo.pop()
        wanted.add(name)
        try:
            requires = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue  # for another Python or platform
        todo |= {distribution(r) for r in requires if "extra ==" not in r} - wanted
    return wanted


def test_everything_that_the_image_copies_is_there():
    text = (CONTAINER / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
