"""Log output: one line an event, constant message first, facts after it, to stderr."""

from __future__ import annotations

import logging
import sys

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NOISY = ("aiohttp.access", "kopf.objects", "kopf._core.engines.peering")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    facts = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    return {key: value for key, value in facts.items() if not key.startswith(("k8s_", "settings"))}


def one_line(text: str) -> str:
    """Return `text` with everything escaped that breaks a line or that a terminal obeys.

    Peers and clients choose names, ids and error texts: none may start a line that nobody wrote.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _fact(value: object) -> str:
    """Return a value as it stands behind `key=`: text that could be taken for more is quoted."""
    shown = one_line(str(value))
    if isinstance(value, str) and (not shown or any(c in ' ="' for c in shown)):
        return '"' + shown.replace('"', '\\"') + '"'
    return shown


def _sound(entry: dict[str, object]) -> dict[str, object]:
    """Return `entry` with half characters written out, for UTF-8 has none."""
    return {
        key: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for key, value in entry.items()
    }


def _set_in(text: str) -> str:
    """Return several lines so that none of them looks like a line of the log."""
    return "".join(f"\n  {one_line(line)}" for line in text.split("\n"))


class TextFormatter(logging.Formatter):
    """`12:00:01.250 INFO reconcile: scaling in object=ns/chat`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it if there is one."""
        name = record.name.removeprefix("baton_operator.")
        facts = "".join(f" {key}={_fact(value)}" for key, value in _extras(record).items())
        head = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        line = f"{head} {record.levelname} {name}: {one_line(record.getMessage())}{facts}"
        if record.exc_info:
            line += _set_in(self.formatException(record.exc_info))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, then the facts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as text."""
        entry: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_sound(entry | _extras(record)), enc_hook=str).decode()


def configure_logging(level: str, style: str) -> None:
    """Send the root logger's records to stderr in this style."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
