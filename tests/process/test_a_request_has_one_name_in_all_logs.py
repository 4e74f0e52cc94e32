"""A request's key is the same text in every process's log, in either format."""

from __future__ import annotations

import json
import logging

from baton_worker.identity import RequestKey, make_handle
from baton_worker.logs import JsonFormatter, TextFormatter

KEY = RequestKey(make_handle(0xF5A5EA, 0x65746241CF), 1)
NAME = "f5a5ea65746241cf/1"


def record() -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "baton_worker.roles", "msg": "request ended"})
    vars(made).update(key=KEY, code="DECODE_FULL")
    return made


def test_a_text_line_has_it_as_one_fact() -> None:
    line = TextFormatter("decode-0").format(record())
    assert line.endswith(f"request ended key={NAME} code=DECODE_FULL")


def test_json_has_it_as_text_for_readers_round_a_number_of_64_bits() -> None:
    assert int(float(KEY.handle)) != KEY.handle, "as a number it would come back as another"
    assert json.loads(JsonFormatter("decode-0").format(record()))["key"] == NAME
