"""What peers and clients say reaches a text log, and never as a line or a command of its own."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator import logs as operator_logs
from baton_worker import logs as worker_logs

FORGERIES = [
    "x\n12:00:00.000 ERROR gateway link: worker down",
    "x\r12:00:00.000 INFO all is well",
    "\x1b[2J\x1b[1;31mred",
    "a\u2028b",
    "a\x85b",
    "safe\u202etxt.exe",
    "\x00",
    "\ud800",
]
FORMATTERS = {
    "worker": worker_logs.TextFormatter("decode-0"),
    "operator": operator_logs.TextFormatter(),
}


def record(message: str = "HELLO rejected", exc_info: object = None, **facts: object):
    made = logging.makeLogRecord(
        {"name": "baton_worker.link", "msg": message, "levelname": "INFO", "exc_info": exc_info}
    )
    vars(made).update(facts)
    return made


@pytest.fixture(params=FORMATTERS.values(), ids=FORMATTERS.keys())
def formatter(request) -> logging.Formatter:
    return request.param


@pytest.mark.parametrize("text", FORGERIES, ids=ascii)
def test_a_fact_or_message_stays_on_its_line(formatter, text: str) -> None:
    for line in (formatter.format(record(detail=text)), formatter.format(record(text))):
        assert line.isprintable()
        assert line.splitlines() == [line]


def test_a_fact_cannot_add_facts_of_its_own(formatter) -> None:
    line = formatter.format(record(detail='x" reason=ok', reason="no"))
    assert line.endswith(r'detail="x\" reason=ok" reason=no')


def test_plain_facts_are_shown_as_they_are(formatter) -> None:
    line = formatter.format(record(worker="decode-0", seconds=1.5, at="tcp://[::1]:7", none=""))
    assert line.endswith('worker=decode-0 seconds=1.5 at=tcp://[::1]:7 none=""')


def test_no_line_of_a_traceback_looks_like_one_of_the_log(formatter) -> None:
    try:
        raise ValueError("bad\n12:00:00.000 INFO forged\x1b[2J")
    except ValueError:
        text = formatter.format(record("failed", sys.exc_info()))
    _, *rest = text.split("\n")
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert any("forged" in line for line in rest), "and nothing is lost"


@given(st.text())
def test_any_text_makes_exactly_one_line(text: str) -> None:
    for formatter in FORMATTERS.values():
        assert formatter.format(record(detail=text)).isprintable()


@pytest.mark.parametrize("text", FORGERIES, ids=ascii)
def test_json_lines_stay_one_object_a_line(text: str) -> None:
    for formatter in (worker_logs.JsonFormatter("decode-0"), operator_logs.JsonFormatter()):
        line = formatter.format(record(detail=text))
        assert "\n" not in line
        assert json.loads(line)["detail"] == text.encode(errors="backslashreplace").decode()
