"""Programs that check what lies in deploy/. A test that needs an absent one is skipped by name."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = Path(os.environ.get("FTCORE_DEPLOY_TOOLS", ROOT / ".deploy-tools"))
CHARTS = {"lighthouse": "ftcore", "training-job": "train"}
IN_CI = os.environ.get("CI") == "true"


def tool(name):
    """The path of a program, from the tools folder or from the system."""
    for candidate in (
        TOOLS / "venv" / "bin" / name,
        TOOLS / name,
        TOOLS / "node_modules/.bin" / name,
    ):
        if candidate.exists():
            return str(candidate)
    found = shutil.which(name)
    if found is None:
        _absent(f"{name} is not installed")
    return found


def node_modules():
    if not (TOOLS / "node_modules").is_dir():
        _absent("the npm packages of tests/deploy are not installed")
    return TOOLS


def _absent(what):
    remedy = "`sh tests/deploy/install.sh .deploy-tools` and tests/system_packages.sh install it"
    (pytest.fail if IN_CI else pytest.skip)(f"{what}: {remedy}")


def run(*command, stdin=None, check=True, cwd=None):
    done = subprocess.run(
        [str(c) for c in command], input=stdin, capture_output=True, text=True, cwd=cwd, timeout=120
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def in_tools_venv(code, stdin):
    """Run Python code where PyYAML and the schemas are."""
    return run(tool("python"), "-c", code, stdin=stdin, check=False)


def render(chart, *options, name=None):
    name = name or {"lighthouse": "lighthouse", "training-job": "llm"}[chart]
    command = [tool("helm"), "template", name, DEPLOY / "helm" / chart, "-n", CHARTS[chart]]
    return run(*command, *options).stdout


def objects(text):
    """All Kubernetes objects of a YAML stream, as JSON values."""
    import json

    code = (
        "import json, sys, yaml; print(json.dumps([d for d in yaml.safe_load_all(sys.stdin) if d]))"
    )
    done = in_tools_venv(code, text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def only(kind, found):
    (one,) = [o for o in found if o["kind"] == kind]
    return one
