"""A worker that fails while it is put together closes what it has of itself, started or not."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    ConfigError,
    ControlConfig,
    CurveConfig,
    EngineConfig,
    HandoffConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
    TracingConfig,
)
from baton_worker.engine.backends.device import start
from baton_worker.engine.engine import StepEngine
from baton_worker.handoff import pool_door
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import Role
from baton_worker.link.keygen import run_keygen
from baton_worker.roles import process
from baton_worker.roles.starting import SIGNALS


def configured(folder: Path, **changes: object) -> ProcessConfig:
    facts: dict[str, object] = {
        "model": ModelConfig(str(TINY_MODEL)),
        "engine": EngineConfig(device="cpu", kv_blocks=64, max_running=2, max_waiting=2),
        "link": LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        "handoff": HandoffConfig(bind="tcp://127.0.0.1:*", shared_dir=str(folder)),
        "health": HttpConfig("127.0.0.1", 0),
        "control": ControlConfig(str(folder / "control")),
    }
    return ProcessConfig(**(facts | changes))  # type: ignore[arg-type]


def secured(folder: Path) -> LinkConfig:
    for name in ("gateway", "decode"):
        run_keygen(folder, name)
    (folder / "allowed").write_text("")
    curve = CurveConfig(
        public_key_file=str(folder / "decode.public"),
        secret_key_file=str(folder / "decode.secret"),
        gateway_public_key_file=str(folder / "gateway.public"),
        allowed_keys_file=str(folder / "allowed"),
    )
    return LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=curve)


def unshared() -> Mock:
    engine = Mock(leases=None)
    engine.load.return_value.kv_blocks_total = 64
    return engine


def threads() -> set[str]:
    return {one.name for one in threading.enumerate()}


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a worker changes of its process: this one's ends by Ctrl-C behind it as before."""
    monkeypatch.setattr(process, "end_on_thread_fault", Mock())
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_transport_that_was_never_started_closes(tmp_path: Path) -> None:
    config = configured(tmp_path, link=secured(tmp_path))
    transport, _ = process._kv_transport(config, Role.DECODE, Mock(), unshared())
    assert "baton-zap" in threads()
    transport.close()
    assert "baton-zap" not in threads()
    assert transport._context.closed


def test_keys_that_went_since_they_were_checked_leave_no_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[zmq.Context[zmq.Socket[bytes]]] = []
    real = zmq.Context

    def noted() -> zmq.Context[zmq.Socket[bytes]]:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(zmq, "Context", noted)
    config = configured(tmp_path, link=secured(tmp_path))
    (tmp_path / "allowed").unlink()
    with pytest.raises(ConfigError, match=r"link\.curve\.allowed_keys_file"):
        process._kv_transport(config, Role.DECODE, Mock(), unshared())
    assert [context.closed for context in made] == [True]


def test_a_worker_whose_last_part_cannot_be_made_closes_those_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed: list[str] = []
    for part in (ZmqKvTransport, StepEngine):
        real = part.close

        def noted(self, real=real, name=part.__name__):  # type: ignore[no-untyped-def]
            closed.append(name)
            real(self)

        monkeypatch.setattr(part, "close", noted)
    config = configured(tmp_path, tracing=TracingConfig(endpoint="collector:4318"))
    with pytest.raises(ConfigError, match=r"tracing\.endpoint is 'collector:4318'"):
        process.run_worker(config, Role.DECODE, on_ready=Mock())
    assert closed == ["ZmqKvTransport", "StepEngine"]
    assert list(tmp_path.iterdir()) == [], "nor its sockets' files"


def test_a_worker_that_does_not_start_closes_what_was_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(ZmqKvTransport, "start", fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        process.run_worker(configured(tmp_path), Role.DECODE, on_ready=Mock())
    assert list(tmp_path.iterdir()) == []
    assert not [r for r in caplog.records if "failed to close" in r.message]


def test_a_transport_whose_address_is_taken_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.bind("tcp://127.0.0.1:*")
        taken = other.getsockopt_string(zmq.LAST_ENDPOINT)
        folder = tmp_path / "shared"
        folder.mkdir()
        handoff = HandoffConfig(bind=taken, shared_dir=str(folder))
        config = configured(tmp_path, link=secured(tmp_path), handoff=handoff)
        engine = process._load_engine(config, Mock())
        try:
            with pytest.raises(ConfigError, match=r"handoff\.bind"):
                process._kv_transport(config, Role.DECODE, Mock(), engine)
        finally:
            engine.close()
    assert "baton-zap" not in threads()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("part", ["_sweep", "Wakeup"])
def test_a_door_without_descriptors_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    none_left = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(pool_door, part, none_left)
    with pytest.raises((ConfigError, OSError), match="Too many open files"):
        pool_door.PoolDoor(str(tmp_path), Mock(), Mock())
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_get_warm_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Mock()
    monkeypatch.setattr(start, "_engine", lambda *_: engine)
    monkeypatch.setattr(start, "warm_up", Mock(side_effect=RuntimeError("no memory for graphs")))
    config = Mock()
    with pytest.raises(RuntimeError, match="no memory for graphs"):
        start.serve_from(config, start.Prepared(Mock(), Mock()), Mock())
    engine.close.assert_called_once_with()
