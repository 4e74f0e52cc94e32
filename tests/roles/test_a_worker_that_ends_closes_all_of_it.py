"""A worker that ends closes every part, and its engine last, whichever part fails to close."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from baton_worker.config import (
    ConfigError,
    ControlConfig,
    CurveConfig,
    HandoffConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
)
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import Role
from baton_worker.roles import process
from baton_worker.roles.control import ControlServer
from baton_worker.roles.starting import SIGNALS, Starting

PARTS = ["watchdog", "link", "transport", "control", "health", "tracing", "engine"]


def configured(folder: Path) -> ProcessConfig:
    return ProcessConfig(
        model=ModelConfig("/nowhere"),
        link=LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        handoff=HandoffConfig(bind="tcp://127.0.0.1:*"),
        health=HttpConfig("127.0.0.1", 0),
        control=ControlConfig(str(folder / "control")),
    )


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, failing: tuple[str, ...]
) -> tuple[list[str], Exception | None]:
    """Run a worker whose loop ends at once; return what was closed, in order, and what it raised.

    The listeners are the real ones.
    """
    closed: list[str] = []

    def close(name: str) -> Mock:
        def noted(*_: object) -> None:
            closed.append(name)
            if name in failing:
                raise RuntimeError(f"{name} does not close")

        return Mock(side_effect=noted)

    def assembled(
        config: ProcessConfig, role: Role, engine: object, starting: Starting
    ) -> SimpleNamespace:
        for name in ("control", "health"):
            part = getattr(starting, name)
            real, noted = part.close, close(name)
            both = Mock(side_effect=lambda real=real, noted=noted: (real(), noted()))
            monkeypatch.setattr(part, "close", both)
        tracing = SimpleNamespace(close=close("tracing"))
        parts = SimpleNamespace(traces=SimpleNamespace(tracing=tracing))
        return SimpleNamespace(
            loop=SimpleNamespace(run=Mock(), inbox=starting.inbox, parts=parts),
            link=SimpleNamespace(start=Mock(), close=close("link")),
            transport=SimpleNamespace(start=Mock(), close=close("transport")),
            watchdog=SimpleNamespace(start=Mock(), close=close("watchdog")),
        )

    monkeypatch.setattr(process, "end_on_thread_fault", Mock())
    monkeypatch.setattr(process, "_health_sources", Mock())
    monkeypatch.setattr(process, "_assemble", assembled)
    engine = SimpleNamespace(close=close("engine"))
    monkeypatch.setattr(process, "_load_engine", lambda *_: engine)
    before = [process.signal.getsignal(number) for number in SIGNALS]
    try:
        code = process.run_worker(configured(folder), Role.MIXED, on_ready=Mock())
    except RuntimeError as error:
        return closed, error
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            process.signal.signal(number, handler)
    assert code == 0
    return closed, None


@pytest.mark.parametrize("failing", [(), *((name,) for name in PARTS), ("link", "transport")])
def test_all_parts_are_closed_in_order_and_the_first_failure_is_raised(
    failing: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed, error = run(monkeypatch, tmp_path, failing)
    assert closed == PARTS
    assert str(error) == (f"{failing[0]} does not close" if failing else "None")
    told = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(told) == len(failing), "each failure once, also of a part's part"


@pytest.mark.parametrize("fails_to_close", [False, True])
def test_an_engine_is_closed_whose_worker_cannot_be_put_together(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fails_to_close: bool,
) -> None:
    def refused(*_: object) -> None:
        raise ConfigError("handoff.bind: the port is taken")

    engine = Mock()
    if fails_to_close:
        engine.close.side_effect = RuntimeError("a graph is in use")
    monkeypatch.setattr(process, "end_on_thread_fault", Mock())
    monkeypatch.setattr(process, "_assemble", refused)
    monkeypatch.setattr(process, "_load_engine", lambda *_: engine)
    with pytest.raises(ConfigError, match="the port is taken"):
        process.run_worker(configured(tmp_path), Role.MIXED, on_ready=Mock())
    engine.close.assert_called_once_with()
    assert not (tmp_path / "control").exists(), "and its listeners are"
    told = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(told) == fails_to_close


def test_a_worker_whose_parts_do_not_start_closes_them_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Starting, "serve", Mock(side_effect=RuntimeError("no thread is left")))
    closed, error = run(monkeypatch, tmp_path, ())
    assert closed == PARTS
    assert str(error) == "no thread is left"


def test_a_control_socket_is_removed_also_where_its_server_does_not_close(tmp_path: Path) -> None:
    control = ControlServer(ControlConfig(str(tmp_path / "control")), Mock())
    control._server = Mock(close=Mock(side_effect=RuntimeError("its loop is gone")))
    listening = control._socket
    with pytest.raises(RuntimeError, match="its loop is gone"):
        control.close()
    assert listening is not None
    assert listening.fileno() == -1
    assert not (tmp_path / "control").exists()


def test_a_transport_closes_what_stands_behind_a_part_that_does_not_close(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = configured(tmp_path)
    transport, _ = process._kv_transport(config, Role.PREFILL, Mock(), Mock(leases=None))
    transport.start(Mock())
    assert isinstance(transport, ZmqKvTransport)
    real = transport._pools.close

    def fails() -> None:
        real()
        raise RuntimeError("mapped")

    monkeypatch.setattr(transport._pools, "close", fails)
    security = Mock(side_effect=transport._security.close)
    monkeypatch.setattr(transport, "_security", Mock(close=security))
    with pytest.raises(RuntimeError, match="mapped"):
        transport.close()
    security.assert_called_once_with()
    transport._context.term()  # which returns: no socket of it is open
