"""Rules, alerts and dashboards: valid, tested, explained, and speaking of metrics that exist."""

import json
import re

import pytest

from tests.deploy.tools import DEPLOY, in_tools_venv, node_modules, run, tool

RULES = DEPLOY / "prometheus"
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
TABLE = (DEPLOY / "METRICS.md").read_text()
FAMILIES = set(re.findall(r"^\| `(ft_\w+)`", TABLE, re.M))
RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text()
ALERTS = re.findall(r"- alert: (\w+)", (RULES / "alerts.yml").read_text())
RECORDED = re.findall(r"- record: (\S+)", (RULES / "rules.yml").read_text())


def expressions():
    for board in BOARDS:
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{board.stem}: {panel['title']}", target["expr"]
    for name in ("rules.yml", "alerts.yml"):
        for one in re.findall(r"expr: (?:\|\n((?: {10}.+\n)+)|(.+)\n)", (RULES / name).read_text()):
            yield name, one[0] or one[1]


def test_promtool_accepts_rules_and_configuration():
    run(tool("promtool"), "check", "rules", RULES / "rules.yml", RULES / "alerts.yml")
    run(tool("promtool"), "check", "config", RULES / "prometheus.yml")


def test_the_unit_tests_of_the_rules_pass():
    run(tool("promtool"), "test", "rules", RULES / "tests.yml")


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_tested_and_has_a_runbook_entry(alert):
    assert f"alertname: {alert}\n" in (RULES / "tests.yml").read_text()
    section = RUNBOOK.partition(f"\n## {alert}\n")[2].partition("\n## ")[0]
    for part in ("**Means**", "**Look at**", "**Do**"):
        assert part in section, f"{part} is missing in the runbook of {alert}"
    text = (RULES / "alerts.yml").read_text()
    assert f"runbook_url: RUNBOOK.md#{alert.lower()}\n" in text


def test_the_runbook_has_no_alert_that_is_gone():
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.M) == ALERTS


@pytest.mark.parametrize("rule", RECORDED)
def test_each_recorded_number_is_tested(rule):
    twins = {rule, re.sub("rate1d$", "rate1h", rule), rule.replace("p99", "p50")}
    assert any(twin in (RULES / "tests.yml").read_text() for twin in twins)


def test_every_expression_is_promql():
    found = [expr.replace("$job", ".+") for _, expr in expressions()]
    code = "import json, sys, promql_parser as p; [p.parse(e) for e in json.load(sys.stdin)]"
    done = in_tools_venv(code, json.dumps(found))
    assert done.returncode == 0, done.stderr
    assert len(found) > 50


def test_every_metric_that_is_asked_for_is_in_the_table():
    for where, expr in expressions():
        for name in re.findall(r"\bft_\w+", expr):
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in FAMILIES or family in FAMILIES, f"{where} asks for {name}"
        for name in re.findall(r"\bft:[\w:]+", expr):
            assert name in RECORDED, f"{where} asks for {name}"


def test_the_dashboards_are_what_their_builder_writes(tmp_path):
    run("python3", DEPLOY / "grafana/build.py", tmp_path)
    for board in BOARDS:
        assert (tmp_path / board.name).read_text() == board.read_text(), "run grafana/build.py"
    assert len(BOARDS) == 3


def compiled(folder, board):
    """tsc's opinion of a dashboard written as a literal of Grafana's own type."""
    names = 'import { type Dashboard, ThresholdsMode } from "@grafana/schema";\n'
    text = json.dumps(board).replace('"mode": "absolute"', '"mode": ThresholdsMode.Absolute')
    (folder / "board.ts").write_text(f"{names}export const board: Dashboard = {text};\n")
    (folder / "node_modules").symlink_to(node_modules() / "node_modules")
    flags = ["--noEmit", "--skipLibCheck", "--strict", "--module", "esnext"]
    command = [tool("tsc"), *flags, "--moduleResolution", "bundler", folder / "board.ts"]
    return run(*command, check=False)


@pytest.mark.parametrize("path", BOARDS, ids=lambda p: p.stem)
def test_grafana_knows_every_field_of_the_dashboard(path, tmp_path):
    done = compiled(tmp_path, json.loads(path.read_text()))
    assert done.returncode == 0, done.stdout


def test_a_field_that_grafana_does_not_know_is_noticed(tmp_path):
    board = json.loads(BOARDS[0].read_text())
    board["panels"][0]["gridPos"]["z"] = 1
    assert "does not exist in type 'GridPos'" in compiled(tmp_path, board).stdout


@pytest.mark.parametrize("path", BOARDS, ids=lambda p: p.stem)
def test_panels_do_not_overlap_and_say_what_they_show(path):
    taken = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["description"].endswith(".")
