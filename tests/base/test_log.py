import json
import logging

from ftcore.base.log import JsonFormatter, LogfmtFormatter, event


def emitted(caplog, formatter, **facts):
    with caplog.at_level(logging.INFO):
        event(logging.getLogger("t"), "heal.finished", **facts)
    return formatter.format(caplog.records[-1])


def test_a_line_names_the_event_and_its_facts(caplog):
    line = emitted(caplog, LogfmtFormatter(), source="r2", seconds=0.25, why="peer died")
    assert line.endswith('INFO t heal.finished source=r2 seconds=0.25 why="peer died"')


def test_json_lines_hold_the_same_facts(caplog):
    line = json.loads(emitted(caplog, JsonFormatter(), source="r2", bytes=7))
    assert (line["event"], line["source"], line["bytes"]) == ("heal.finished", "r2", 7)
