"""One number decides all time limits; what contradicts is named."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ftcore.__main__ import main
from ftcore.base.errors import BadSetting
from ftcore.base.ladder import ORDERS, RULES, climb, ladder_text


def test_without_a_word_the_defaults_stand():
    ladder = climb()
    assert (ladder["heartbeat_timeout_s"], ladder["collective_timeout_s"]) == (2.0, 60.0)
    assert ladder.limits["detect_within_s"].source == "default"


def test_one_number_moves_all_the_others():
    ladder = climb({"detect_within_s": 10.0})
    assert ladder["report_every_s"] == 2.5
    assert (ladder["collective_timeout_s"], ladder["hang_after_s"]) == (300.0, 150.0)
    del ladder.limits["detect_within_s"]
    assert {limit.source for limit in ladder.limits.values()} == {"derived"}


def test_what_waits_for_work_has_a_floor():
    ladder = climb({"detect_within_s": 0.2})
    assert ladder["heal_timeout_s"] == 600.0 and ladder["heartbeat_timeout_s"] == 0.2
    assert "at least 600" in ladder.limits["heal_timeout_s"].why


def test_an_argument_comes_before_the_environment_and_that_before_the_rule():
    env = {"FTCORE_DETECT_WITHIN_S": "4", "FTCORE_HEAL_TIMEOUT_S": "9000"}
    ladder = climb({"detect_within_s": 1.0}, env)
    assert (ladder["detect_within_s"], ladder["heal_timeout_s"]) == (1.0, 9000.0)
    sources = {name: ladder.limits[name].source for name in ("detect_within_s", "heal_timeout_s")}
    assert sources == {"detect_within_s": "argument", "heal_timeout_s": "environment"}


def test_a_limit_of_another_limit_follows_it():
    assert climb({"collective_timeout_s": 20.0})["hang_after_s"] == 10.0


def test_a_contradiction_is_refused_with_both_values_and_the_remedy():
    with pytest.raises(BadSetting) as caught:
        climb({"detect_within_s": 90.0, "collective_timeout_s": 60.0})
    assert "detect_within_s 90 s (argument)" in str(caught.value)
    assert "collective_timeout_s 60 s (argument)" in str(caught.value)
    assert "Raise collective_timeout_s above 90 s" in caught.value.remedy


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: f"{o.low}<{o.high}")
def test_each_order_is_refused_when_it_is_turned_around(order):
    with pytest.raises(BadSetting, match=order.low):
        climb({order.low: 1e6, order.high: 1e5})


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_limit_is_a_time_above_zero(seconds):
    with pytest.raises(BadSetting, match="attach_timeout_s"):
        climb({"attach_timeout_s": seconds})


def test_the_look_at_hangs_can_be_turned_off():
    assert climb({"hang_after_s": 0.0})["hang_after_s"] == 0.0


def test_an_environment_that_is_no_number_is_named():
    with pytest.raises(BadSetting, match="FTCORE_HEAL_TIMEOUT_S is 'soon'"):
        climb({}, {"FTCORE_HEAL_TIMEOUT_S": "soon"})


@given(st.floats(min_value=0.01, max_value=1000))
def test_whatever_the_number_what_is_derived_never_contradicts_itself(seconds):
    ladder = climb({"detect_within_s": seconds})
    assert all(ladder[order.low] < ladder[order.high] for order in ORDERS)


def test_the_text_has_a_line_a_limit_with_its_source():
    lines = ladder_text(climb({"heal_timeout_s": 700.0})).splitlines()
    assert len(lines) == len(RULES)
    assert any("heal_timeout_s" in line and "700 s  argument" in line for line in lines)


def config(*arguments, **env):
    return CliRunner().invoke(main, ["config", *arguments], env=env)


def test_ftcore_config_prints_the_ladder_and_its_sources():
    answer = config("--json", "--set", "heal_timeout_s=700", FTCORE_DETECT_WITHIN_S="3")
    found = json.loads(answer.output)
    assert found["detect_within_s"]["source"] == "environment"
    assert found["heal_timeout_s"] == {"seconds": 700.0, "source": "argument", "why": ""}
    assert found["heartbeat_timeout_s"]["seconds"] == 3.0
    assert "collective_timeout_s" in config().output


@pytest.mark.parametrize("setting", ["patience_s=3", "heal_timeout_s=soon"])
def test_ftcore_config_refuses_what_is_no_limit(setting):
    answer = config("--set", setting)
    assert answer.exit_code != 0 and setting.split("=")[0] in answer.output
