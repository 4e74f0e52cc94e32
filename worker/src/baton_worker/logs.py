"""Log output: one line an event, constant message first, facts after it.

Callers write `log.info("gateway linked", extra={"incarnation": 7})`; this module prints the extras
as `key=value` (text) or as one JSON object a line. Logs go to stderr: stdout belongs to `--json`.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn repeats its message with terminal codes
}


LOG_SECONDS = 10.0
BURST_LINES = 2000.0
LINES_PER_SECOND = 10.0
_MOST_KINDS = 1024


class _Allowance(NamedTuple):
    left: float
    at: float
    left_out: int


class Seldom:
    """Says when a line of a kind is due: once in `LOG_SECONDS`, for a flood of what strangers do
    must not become one of the logs. Kinds are few, and each occurrence has a counter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def is_due(self, kind: str) -> bool:
        """Whether to log now; then not again for a while."""
        now = self._clock()
        if now - self._logged_at.get(kind, -LOG_SECONDS) < LOG_SECONDS:
            return False
        self._logged_at[kind] = now
        return True


class Bounded(logging.Filter):
    """Lets each message through so many times at once, and so often a second for ever.

    What a peer causes by coming and going, or a client by failing, must not fill a disk, wherever
    it is logged; a worker's death with all its requests must not lose a line. Messages are constant
    here (see the module), so they are the kinds. The next line that is let through says how many
    were not, as `left_out`. What ends the process is never held back.
    """

    def __init__(
        self,
        burst: float = BURST_LINES,
        per_second: float = LINES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, str], _Allowance] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        if record.levelno >= logging.CRITICAL:
            return True
        with self._lock:
            left_out = self._take((record.name, str(record.msg)), self._clock())
        if left_out:
            record.left_out = left_out
        return left_out is not None

    def _take(self, kind: tuple[str, str], now: float) -> int | None:
        """Return how many were left out before this one; None when it is, too."""
        left, at, left_out = self._kinds.get(kind, _Allowance(self._burst, now, 0))
        left = min(self._burst, left + (now - at) * self._per_second)
        is_let = left >= 1.0
        after = _Allowance(left - 1.0, now, 0) if is_let else _Allowance(left, now, left_out + 1)
        self._kinds[kind] = after
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        return left_out if is_let else None


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


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


def _sound(value: object) -> object:
    """Return a value as it goes into JSON: half characters are written out, for UTF-8 has none,
    and what has names for its parts, as a request's key, is the text that it makes of itself.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return str(value)
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _set_in(text: str) -> str:
    """Return several lines so that none of them looks like a line of the log."""
    return "".join(f"\n  {one_line(line)}" for line in text.split("\n"))


class TextFormatter(logging.Formatter):
    """`12:00:01.250 INFO prefill-0 roles.loop: draining requests=3`."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s.%(msecs)03d", datefmt="%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it if there is one."""
        name = record.name.removeprefix("baton_worker.")
        facts = "".join(f" {key}={_fact(value)}" for key, value in _extras(record).items())
        head = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        message = one_line(record.getMessage())
        line = f"{head} {record.levelname} {self._process} {name}: {message}{facts}"
        if record.exc_info:
            line += _set_in(self.formatException(record.exc_info))
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
        sound = {key: _sound(value) for key, value in (entry | _extras(record)).items()}
        return msgspec.json.encode(sound, enc_hook=str).decode()


def configure_logging(process: str, level: str, style: LogFormat) -> None:
    """Send the root logger's records to stderr in this style."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Bounded())
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def say_within(line: Callable[[], None], seconds: float) -> None:
    """Say a line and return when it is said, or after so long: who ends a process must not wait for
    a log that nobody reads, nor for a lock of logging's that is his own.

    A signal's handler may call it: it takes none of the locks of `threading`, which the interrupted
    thread may have.
    """
    said = _thread.allocate_lock()
    said.acquire()

    def say() -> None:
        try:
            line()
        finally:
            said.release()

    _thread.start_new_thread(say, ())
    said.acquire(timeout=seconds)
