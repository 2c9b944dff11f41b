"""What a machine says of itself: which answers mean that it goes."""

import json

import pytest

from ftcore.base.errors import BadSetting
from ftcore.notice import CLOUDS, Notice, Preemption


def said(cloud, status, body=""):
    return CLOUDS[cloud].read(status, body if isinstance(body, str) else json.dumps(body))


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("status", [0, 401, 404, 500, 503])
def test_no_answer_and_no_page_are_no_notice(cloud, status):
    assert said(cloud, status, "TRUE") == ""


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("body", ["", "FALSE", "<html>", "[]", "{}", "null", '{"Events": 3}'])
def test_an_answer_without_a_notice_is_none(cloud, body):
    assert said(cloud, 200, body) == ""


def test_aws_names_the_action_and_the_time():
    answer = {"action": "terminate", "time": "2026-01-01T08:22:00Z"}
    assert said("aws", 200, answer) == "AWS will terminate this instance at 2026-01-01T08:22:00Z"


def test_gcp_says_true():
    assert said("gcp", 200, "TRUE\n") == "GCP preempts this instance"


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy"])
def test_azure_announces_that_the_machine_goes(kind):
    events = [{"EventType": "Freeze"}, {"EventType": kind, "NotBefore": "soon"}]
    assert said("azure", 200, {"Events": events}) == f"Azure announces {kind}, not before soon"


@pytest.mark.parametrize("kind", ["Freeze", "Reboot", None])
def test_azure_events_that_keep_the_machine_are_no_notice(kind):
    assert said("azure", 200, {"Events": [{"EventType": kind}, "?"]}) == ""


def test_a_notice_lasts_as_long_as_its_giver_allows():
    assert Preemption().ends_at(100.0) == 130.0
    assert Preemption(cloud="aws").ends_at(100.0) == 220.0
    assert Preemption(cloud="aws", notice_s=5).ends_at(100.0) == 105.0


def test_what_is_left_of_a_notice_is_never_negative():
    notice = Notice(reason="SIGTERM", ends_at=10.0)
    assert (notice.left_s(7.0), notice.left_s(11.0)) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cloud": "ibm"}, "'ibm', not one of aws, gcp, azure"),
        ({"metadata_url": "http://h"}, "no cloud is named"),
        ({"poll_s": 0}, "poll_s is 0"),
        ({"notice_s": -1.0}, "notice_s is -1.0"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, named):
    with pytest.raises(BadSetting, match=named):
        Preemption(**settings)
