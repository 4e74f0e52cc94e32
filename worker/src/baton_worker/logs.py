"""Log output: one line an event, constant message first, facts after it.

Callers write `log.info("gateway linked", extra={"incarnation": 7})`; this module prints the extras
as `key=value` (text) or as one JSON object a line. Logs go to stderr: stdout belongs to `--json`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn repeats its message with terminal codes
}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`12:00:01.250 INFO prefill-0 roles.loop: draining requests=3`."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s.%(msecs)03d", datefmt="%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it if there is one."""
        name = record.name.removeprefix("baton_worker.")
        facts = "".join(f" {key}={value}" for key, value in _extras(record).items())
        head = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        line = f"{head} {record.levelname} {self._process} {name}: {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `process`, `logger`, `message`, then the facts."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as text."""
        entry: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry | _extras(record), enc_hook=str).decode()


def configure_logging(process: str, level: str, style: LogFormat) -> None:
    """Send the root logger's records to stderr in this style."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
