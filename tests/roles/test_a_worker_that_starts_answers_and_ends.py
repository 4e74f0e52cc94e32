"""Before its engine is there: who hangs is ended by liveness, who fails stops listening, and a
signal ends the process though its log takes no line.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton_testing.processes import HTTP
from baton_worker.config import ControlConfig, HttpConfig, ModelConfig, ProcessConfig
from baton_worker.engine.load_progress import STILL_SECONDS
from baton_worker.identity import Role
from baton_worker.logs import say_within
from baton_worker.roles import starting as module
from baton_worker.roles.starting import SIGNALS, Starting


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Starting]:
    config = ProcessConfig(
        model=ModelConfig("/nowhere"),
        health=HttpConfig("127.0.0.1", 0),
        control=ControlConfig(str(tmp_path / "control")),
    )
    one = Starting(config, Role.MIXED)
    yield one
    one.close()


def status(one: Starting, path: str) -> int:
    return HTTP.get(f"{one.health.url}{path}").status_code


def test_liveness_ends_a_start_that_hangs(started: Starting) -> None:
    assert status(started, "/healthz") == 200
    started.progress._moved_at -= STILL_SECONDS + 1.0
    assert status(started, "/healthz") == 503


def test_who_fails_stops_listening_and_leaves_signals_as_they_were(
    started: Starting, tmp_path: Path
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    within: list[object] = []

    def fails() -> None:
        within.extend(signal.getsignal(number) for number in SIGNALS)
        raise RuntimeError("it fails")

    with pytest.raises(RuntimeError, match="it fails"), started.ending_on_signal():
        fails()
    assert len(within) == len(before)
    assert within != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not (tmp_path / "control").exists()
    with pytest.raises(httpx.ConnectError):
        status(started, "/healthz")


def test_a_signal_ends_it_though_the_log_takes_no_line(
    started: Starting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where the interrupted thread holds a lock of the log's, or nobody reads the pipe."""
    monkeypatch.setattr(module, "SAY_SECONDS", 0.01)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    held = threading.Lock()

    def waits(record: logging.LogRecord) -> bool:
        with held:
            return True

    module.log.addFilter(waits)
    try:
        with held:
            started._end(signal.SIGTERM, None)
            assert ended == [0]
            assert not (tmp_path / "control").exists()
    finally:
        module.log.removeFilter(waits)


def test_what_is_said_in_time_has_been_said() -> None:
    said: list[str] = []
    say_within(lambda: said.append("it"), 30.0)
    assert said == ["it"]
