"""A decode worker that takes no KV costs its own requests only; deliveries are timed (R31, R44)."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, HandoffConfig
from baton_worker.handoff.api import HandoffArrived, HandoffDelivered, HandoffEvent, HandoffFailed
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode

ALLOWED_DELAY_SECONDS = 0.010
N_STUCK, N_TIMED = 40, 15


class End:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.context: zmq.Context[Any] = zmq.Context()
        metrics = HandoffMetrics(MetricFactory(self.registry, "m", "mixed"))
        security = kv_security(
            CurveConfig(enabled=False), self.context, metrics.handshake_refused, takes_offers=True
        )
        self.transport = ZmqKvTransport(
            HandoffConfig(bind="tcp://127.0.0.1:0"),
            metrics,
            context=self.context,
            security=security,
            takes_offers=True,
        )
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self.transport.start(self.events.put)

    def close(self) -> None:
        self.transport.close()
        self.context.term()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    prefill, decode = End(), End()
    yield prefill, decode
    prefill.close()
    decode.close()


@pytest.fixture
def silent() -> Iterator[DecodeTarget]:
    """A port that accepts connections and never reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield DecodeTarget("silent", f"tcp://127.0.0.1:{port}")


def quickest(prefill: End, decode: End, make_handoff: Any, first: int) -> float:
    """Return the shortest of several deliveries: what remains is the transport's own doing."""
    target = DecodeTarget("decode-0", decode.transport.endpoint)
    taken = []
    for n in range(first, first + N_TIMED):
        handoff = make_handoff(handle=(1 << 40) + n)
        started = time.perf_counter()
        prefill.transport.offer(target, handoff, 20.0)
        assert isinstance(decode.events.get(timeout=10), HandoffArrived)
        decode.transport.acknowledge(RequestKey(handoff.state.handle, 0))
        delivered = prefill.events.get(timeout=10)
        taken.append(time.perf_counter() - started)
        assert isinstance(delivered, HandoffDelivered)
        assert delivered.key.handle == handoff.state.handle
    return min(taken)


def test_others_are_delivered_as_quickly_beside_stuck_transfers(ends, silent, make_handoff):
    prefill, decode = ends
    alone = quickest(prefill, decode, make_handoff, first=1)
    calls = []
    for n in range(N_STUCK):
        handoff = make_handoff(handle=(1 << 40) + 1000 + n)
        started = time.perf_counter()
        prefill.transport.offer(silent, handoff, 30.0)
        calls.append(time.perf_counter() - started)
    assert sorted(calls)[N_STUCK // 2] < ALLOWED_DELAY_SECONDS, (
        "the engine thread waits for nothing"
    )
    beside = quickest(prefill, decode, make_handoff, first=100)
    assert beside - alone < ALLOWED_DELAY_SECONDS
    for n in range(N_STUCK):
        prefill.transport.cancel(RequestKey((1 << 40) + 1000 + n, 0))


def test_a_stuck_transfer_ends_at_its_deadline(ends, silent, make_handoff):
    prefill, _ = ends
    started = time.perf_counter()
    prefill.transport.offer(silent, make_handoff(), 0.3)
    failed = prefill.events.get(timeout=10)
    assert isinstance(failed, HandoffFailed)
    assert failed.code is ErrorCode.HANDOFF_TIMEOUT
    assert time.perf_counter() - started >= 0.3


def test_each_delivery_is_timed_from_offer_to_import(ends, make_handoff):
    prefill, decode = ends
    quickest(prefill, decode, make_handoff, first=1)
    labels = {"model": "m", "role": "mixed"}
    value = prefill.registry.get_sample_value
    assert value("baton_handoff_seconds_count", labels) == N_TIMED
    whole = value("baton_handoff_seconds_sum", labels)
    parts = [value(f"baton_handoff_{part}_seconds_sum", labels) for part in ("transfer", "import")]
    assert min(parts) > 0, "the KV's way and decode's import are told apart"
    assert sum(parts) == pytest.approx(whole)
