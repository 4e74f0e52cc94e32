"""A process that stood still (SIGSTOP, a host that swaps) takes none of its time for others'."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, HandoffConfig
from baton_worker.handoff import receiver, sender, zmq_transport
from baton_worker.handoff.api import HandoffEvent, HandoffFailed
from baton_worker.handoff.dealers import STUCK_MS
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.room import Wish
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode

NOBODY = DecodeTarget("decode-9", "tcp://127.0.0.1:9")
KEY = RequestKey((1 << 40) + 5, 0)
DEADLINE, STALL = 20.0, 3600.0
CATCH_UP = STUCK_MS / 1000
QUEUE = 30.0
PLACES = PlaceLimits(
    slots=4, receive_bytes=1 << 20, kv_tokens=1 << 20, asks=16, queue_seconds=QUEUE
)


class Stepped:
    """A transport whose thread is the test, and whose time is told."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[HandoffEvent] = []
        self.context: zmq.Context[Any] = zmq.Context()
        metrics = HandoffMetrics(MetricFactory(CollectorRegistry(), "m", "mixed"))
        security = kv_security(
            CurveConfig(enabled=False), self.context, metrics.handshake_refused, takes_offers=True
        )
        config = HandoffConfig(bind="tcp://127.0.0.1:0")
        self.transport = ZmqKvTransport(
            config, metrics, context=self.context, security=security, places=PLACES
        )
        self.transport._on_event = self.events.append
        self.places = self.transport._receiver._places  # type: ignore[union-attr]

    def run(self, seconds: float) -> None:
        """Let time pass while the thread has its turns."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.transport._turn()

    def close(self) -> None:
        self.transport._sender.close()
        self.transport._receiver.close()  # type: ignore[union-attr]
        self.transport._pools.close()
        self.transport._security.close()
        self.context.term()


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Stepped] = []
    clock = SimpleNamespace(monotonic=lambda: made[0].now if made else 1000.0)
    for module in (zmq_transport, sender, receiver):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(zmq_transport, "_IDLE_POLL_SECONDS", 0.0)
    made.append(Stepped())
    yield made[0]
    made[0].close()


@pytest.mark.parametrize("what", ["ask", "offer"])
def test_decode_has_its_whole_deadline_although_prefill_stood_still(
    stepped: Stepped, make_handoff: Callable[..., Any], what: str
) -> None:
    if what == "ask":
        stepped.transport.ask(NOBODY, KEY, Wish(10, 10), DEADLINE)
    else:
        stepped.transport.offer(NOBODY, make_handoff(), DEADLINE)
    stepped.run(1.0)
    stepped.now += STALL
    stepped.run(DEADLINE - 5.0)
    assert stepped.events == [], "the time in which nobody listened is nobody's silence"
    stepped.run(CATCH_UP + 10.0)
    (event,) = stepped.events
    assert isinstance(event, HandoffFailed)
    assert event.code is ErrorCode.HANDOFF_TIMEOUT


def test_a_place_is_kept_although_decode_stood_still(stepped: Stepped) -> None:
    stepped.places.ask(KEY, Wish(10, 10), stepped.now)
    stepped.run(1.0)
    assert stepped.places.n_taken == 1
    stepped.now += STALL
    stepped.run(QUEUE - 5.0)
    assert stepped.places.n_taken == 1
    stepped.run(CATCH_UP + 10.0)
    assert stepped.places.n_taken == 0
