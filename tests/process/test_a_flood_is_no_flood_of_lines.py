"""What strangers can cause as often as they like is logged once in a while, each kind by itself."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.logs import LOG_SECONDS, Bounded, Seldom, TextFormatter, configure_logging

EVENTS = st.lists(st.tuples(st.floats(0, 2 * LOG_SECONDS), st.sampled_from("abc")), max_size=60)


@given(EVENTS)
def test_each_kind_has_its_first_line_and_then_one_in_a_while(
    events: list[tuple[float, str]],
) -> None:
    now, logged = 0.0, dict[str, list[float]]()
    seldom = Seldom(lambda: now)
    for after, kind in events:
        now += after
        silent = now - logged[kind][-1] if kind in logged else LOG_SECONDS
        assert seldom.is_due(kind) == (silent >= LOG_SECONDS)
        if silent >= LOG_SECONDS:
            logged.setdefault(kind, []).append(now)


def record(message: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("baton_worker.link", level, "", 0, message, None, None)


@given(st.lists(st.floats(0, 3), max_size=80))
def test_a_message_comes_as_often_as_it_may_and_what_was_left_out_is_told(
    pauses: list[float],
) -> None:
    now, logged, told = 0.0, 0, 0
    bounded = Bounded(burst=5, per_second=0.5, clock=lambda: now)
    for after in pauses:
        now += after
        one = record("worker down")
        if bounded.filter(one):
            logged += 1
            told += getattr(one, "left_out", 0)
        assert logged <= 5 + now * 0.5 + 1e-6
    now += 1e6
    last = record("worker down")
    assert bounded.filter(last)
    assert logged + 1 + told + getattr(last, "left_out", 0) == len(pauses) + 1


def test_each_message_has_its_own_bound_and_the_last_words_have_none() -> None:
    bounded = Bounded(burst=1, per_second=1.0, clock=lambda: 0.0)
    assert [bounded.filter(record(message)) for message in "aabb"] == [True, False, True, False]
    assert all(bounded.filter(record("a", logging.CRITICAL)) for _ in range(9))


def test_messages_that_are_never_the_same_are_not_remembered_for_ever() -> None:
    bounded = Bounded(clock=lambda: 0.0)
    for n in range(5000):
        assert bounded.filter(record(f"made of {n}"))
    assert len(bounded._kinds) == 1024


def test_a_process_logs_so(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    monkeypatch.setattr("sys.stderr", written)
    try:
        configure_logging("gateway", "info", "text")
        assert isinstance(root.handlers[0].formatter, TextFormatter)
        for _ in range(5000):
            logging.getLogger("baton_worker.link").info("worker is back")
    finally:
        root.handlers, root.level = handlers, level
    assert 2000 <= written.getvalue().count("worker is back") < 5000
