"""Before its engine is there: who hangs is ended by liveness, who fails stops listening, and a
signal ends the process though its log takes no line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton_testing.processes import HTTP
from baton_worker.config import (
    ConfigError,
    ControlConfig,
    CurveConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
)
from baton_worker.engine.closing import closing_on_failure
from baton_worker.engine.load_progress import STILL_SECONDS
from baton_worker.faults import EXIT_FAULT
from baton_worker.identity import Role
from baton_worker.logs import say_within
from baton_worker.roles import process
from baton_worker.roles import starting as module
from baton_worker.roles.starting import SIGNALS, Starting


def configured(folder: Path) -> ProcessConfig:
    return ProcessConfig(
        model=ModelConfig("/nowhere"),
        link=LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        health=HttpConfig("127.0.0.1", 0),
        control=ControlConfig(str(folder / "control")),
    )


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Starting]:
    one = Starting(configured(tmp_path), Role.MIXED)
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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_a_failed_start_closes_takes_its_exit_code_from_nobody(
    started: Starting, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Whether it comes while an engine closes that did not come to be, a part of the worker, or
    what answered probes.
    """
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    told: list[signal.Signals] = []

    def is_told_to_end() -> None:
        signal.raise_signal(number)
        told.append(number)

    close = started.close
    monkeypatch.setattr(started, "close", lambda: (is_told_to_end(), close()))

    def start() -> None:
        with started.ending_on_signal(), closing_on_failure() as worker:
            worker.append(is_told_to_end)
            with closing_on_failure() as engine:
                engine.append(is_told_to_end)
                raise ConfigError("no room for it")

    with pytest.raises(ConfigError, match="no room for it"):
        start()
    assert (told, ended) == ([number] * 3, [])


def test_a_signal_ends_a_start_that_goes_on_behind_a_failure(
    started: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with contextlib.suppress(ConfigError), closing_on_failure():
        raise ConfigError("it goes without")
    started._end(signal.SIGTERM, None)
    assert ended == [0]


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


def test_a_thread_that_dies_while_the_engine_is_made_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Threads of its ranks, of NIXL and of health begin before it is there."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def fails() -> None:
        raise RuntimeError("a defect")

    def load(*_: object) -> None:
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        raise ConfigError("no model")

    monkeypatch.setattr(process, "_load_engine", load)
    with pytest.raises(ConfigError, match="no model"):
        process.run_worker(configured(tmp_path), Role.MIXED, on_ready=lambda ready: None)
    assert ended == [EXIT_FAULT]


def held_by_thread() -> dict[int, bool]:
    """Return of each thread of this process whether it holds SIGTERM."""
    held = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended since it was listed
        lines = dict(line.split(":", 1) for line in status.splitlines())
        held[int(task.name)] = bool(int(lines["SigBlk"], 16) & 1 << (signal.SIGTERM - 1))
    return held


def test_while_the_engine_is_made_the_main_thread_alone_takes_signals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of others, one would take them while Paddle loads, whose handler is in place then."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    before, meanwhile = held_by_thread(), dict[int, bool]()

    def load(*_: object) -> None:
        meanwhile.update(held_by_thread())
        raise ConfigError("no model")

    monkeypatch.setattr(process, "_load_engine", load)
    with pytest.raises(ConfigError, match="no model"):
        process.run_worker(configured(tmp_path), Role.MIXED, on_ready=lambda ready: None)
    own = [is_held for thread, is_held in meanwhile.items() if thread not in before]
    assert own
    assert all(own)
    assert not meanwhile[os.getpid()]
    assert not held_by_thread()[os.getpid()]


def test_what_is_said_in_time_has_been_said() -> None:
    said: list[str] = []
    say_within(lambda: said.append("it"), 30.0)
    assert said == ["it"]
