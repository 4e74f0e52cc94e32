"""A decode worker's log says how many of the longest requests its room for sent KV takes."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    ControlConfig,
    CurveConfig,
    EngineConfig,
    HandoffConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
)
from baton_worker.handoff.places import PlaceLimits, Places
from baton_worker.handoff.room import Wish
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import RequestKey, Role
from baton_worker.roles import process
from baton_worker.roles.received import tell_room

QWEN3_8B_TOKEN_BYTES = 147_456
KV_BLOCKS = 21_000
ROOMS = [(2 << 30, 1), (4 << 30, 3), (8 << 30, 6)]
"""How many prompts of 8,192 tokens, 1.125 GiB of KV each, of one prefill worker."""


def engine_of(max_model_len: int) -> Mock:
    engine = Mock()
    engine.options.max_model_len = max_model_len
    engine.handoff_bytes = lambda n_tokens: n_tokens * QWEN3_8B_TOKEN_BYTES
    engine.load.return_value.kv_blocks_total = KV_BLOCKS
    return engine


def config_of(**handoff: object) -> ProcessConfig:
    return ProcessConfig(
        ModelConfig("m"),
        engine=EngineConfig(max_running=256),
        handoff=HandoffConfig(**handoff),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("room", "n"), ROOMS)
def test_the_number_that_is_told_is_the_number_that_is_granted(
    room: int, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(receive_bytes=room)
    with caplog.at_level(logging.INFO):
        tell_room(config, engine_of(8192))
    (line,) = (r.getMessage() for r in caplog.records)
    assert line == (
        f"KV that is sent: handoff.receive_bytes is {room >> 30} GiB, of which one prefill worker "
        f"gets room for requests of engine.max_model_len 8192, 1.12 GiB each, at once: {n}"
    )
    places = Places(PlaceLimits.of(config, KV_BLOCKS))
    for number in range(12):
        places.ask(RequestKey(number, 0), Wish(8192 * QWEN3_8B_TOKEN_BYTES, 8192), 0.0, "prefill")
    assert len(places.grant(0.0)) == n


@pytest.mark.parametrize(
    ("engine", "n"),
    [(EngineConfig(max_running=256), 41), (EngineConfig(max_running=2, max_waiting=2), 4)],
)
def test_no_more_are_told_than_pool_and_slots_take(
    engine: EngineConfig, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A room that is raised beyond them brings nothing, and costs memory."""
    config = ProcessConfig(
        ModelConfig("m"), engine=engine, handoff=HandoffConfig(receive_bytes=64 << 30)
    )
    with caplog.at_level(logging.INFO):
        tell_room(config, engine_of(8192))
    assert caplog.records[0].getMessage().endswith(f"at once: {n}")
    places = Places(PlaceLimits.of(config, KV_BLOCKS))
    for number in range(60):
        places.ask(RequestKey(number, 0), Wish(8192 * QWEN3_8B_TOKEN_BYTES, 8192), 0.0, "prefill")
    assert len(places.grant(0.0)) == n


@pytest.mark.parametrize("require", ["nvlink", "rdma"])
def test_nothing_is_told_of_sent_kv_where_none_may_be_sent(
    require: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tell_room(config_of(require=require), engine_of(8192))
    assert not caplog.records


@pytest.mark.parametrize(("role", "n_lines"), [(Role.DECODE, 1), (Role.PREFILL, 0)])
def test_decode_tells_it_at_its_start_and_prefill_does_not(
    role: Role,
    n_lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process, "end_on_thread_fault", Mock())
    monkeypatch.setattr(ZmqKvTransport, "start", Mock(side_effect=RuntimeError("far enough")))
    config = ProcessConfig(
        ModelConfig(str(TINY_MODEL)),
        engine=EngineConfig(kv_blocks=64, max_running=2, max_waiting=2),
        link=LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        handoff=HandoffConfig(bind="tcp://127.0.0.1:*"),
        health=HttpConfig("127.0.0.1", 0),
        control=ControlConfig(str(tmp_path / "control")),
    )
    before = [process.signal.getsignal(number) for number in process.SIGNALS]
    try:
        with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="far enough"):
            process.run_worker(config, role, on_ready=Mock())
    finally:
        for number, handler in zip(process.SIGNALS, before, strict=True):
            process.signal.signal(number, handler)
    assert len([r for r in caplog.records if hasattr(r, "longest_received")]) == n_lines
