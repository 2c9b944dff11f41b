"""Write events as log lines: a dotted name in the past tense and its facts."""

from __future__ import annotations

import json
import logging
import sys


def event(log: logging.Logger, name: str, /, *, level: int = logging.INFO, **facts: object) -> None:
    """Log `name` ("heal.finished") with its facts. Units belong in the names of the facts."""
    if log.isEnabledFor(level):
        log.log(level, "%s", name, extra={"facts": facts})


class LogfmtFormatter(logging.Formatter):
    """`2026-11-30T12:00:00.123 INFO ftcore.manager heal.finished source=r2 bytes=1000`"""

    default_msec_format = "%s.%03d"
    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = getattr(record, "facts", {})
        words = [self.formatTime(record), record.levelname, record.name, record.getMessage()]
        words += [f"{key}={_logfmt(value)}" for key, value in facts.items()]
        if record.exc_info:
            words.append("\n" + self.formatException(record.exc_info))
        return " ".join(words)


class JsonFormatter(LogfmtFormatter):
    """One JSON object a line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = getattr(record, "facts", {})
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **facts,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _logfmt(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=\n') else text


def configure_logging(*, level: str = "INFO", json_lines: bool = False) -> None:
    """Send all events to stderr. Called by command lines only; a library never configures logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else LogfmtFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
