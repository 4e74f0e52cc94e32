"""Fixtures for the KV channel: handoffs with recognisable content."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, HandoffConfig
from baton_worker.engine.api import Handoff
from baton_worker.handoff.api import HandoffEvent
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.messages import DecodeTarget, HandoffState
from baton_worker.metrics import MetricFactory
from baton_worker.ports import port_of, reserve_port
from baton_worker.sampling import SamplingParams

PLACES = PlaceLimits(
    slots=16, receive_bytes=1 << 30, kv_tokens=1 << 20, asks=1024, queue_seconds=600.0
)


class OpenEnd:
    """One process's transport without CURVE, with its events in a queue."""

    def __init__(self, config: HandoffConfig, places: PlaceLimits) -> None:
        self.registry = CollectorRegistry()
        self.context: zmq.Context[Any] = zmq.Context()
        metrics = HandoffMetrics(MetricFactory(self.registry, "m", "mixed"))
        security = kv_security(
            CurveConfig(enabled=False), self.context, metrics.handshake_refused, takes_offers=True
        )
        self.transport = ZmqKvTransport(
            config, metrics, context=self.context, security=security, places=places
        )
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self.transport.start(self.events.put)

    def next(self, seconds: float = 60.0) -> HandoffEvent:
        return self.events.get(timeout=seconds)

    def value(self, name: str, **labels: str) -> float:
        labels = {"model": "m", "role": "mixed", **labels}
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget("decode-0", self.transport.endpoint)

    def close(self) -> None:
        if not self.context.closed:
            self.transport.close()
            self.context.term()


@pytest.fixture
def handoff_end() -> Iterator[Callable[..., OpenEnd]]:
    """Return how to make ends, with a configuration and places or the default ones."""
    ends: list[OpenEnd] = []

    def make(config: HandoffConfig | None = None, places: PlaceLimits = PLACES) -> OpenEnd:
        ends.append(OpenEnd(config or HandoffConfig(), places))
        return ends[-1]

    yield make
    for end in ends:
        end.close()


@pytest.fixture
def kept_address() -> Iterator[str]:
    """Return an address to bind and, once that is closed, to bind again: nobody else gets it."""
    with reserve_port("127.0.0.1") as keeper:
        yield f"tcp://127.0.0.1:{port_of(keeper)}"


@pytest.fixture
def make_handoff() -> Callable[..., Handoff]:
    def make(handle: int = 1 << 40, attempt: int = 0, n_cached: int = 20, **over: Any) -> Handoff:
        fields: dict[str, Any] = {
            "handle": handle,
            "attempt": attempt,
            "model_fingerprint": "f",
            "dtype": "float32",
            "n_layers": 3,
            "kv_heads": 2,
            "block_size": 8,
            "head_dim": 4,
            "n_cached": n_cached,
            "prompt_token_ids": tuple(range(n_cached)),
            "sampling": SamplingParams(seed=7),
            "logprobs_k": 2,
            "first_token": 5,
            "width": 3,
            "first_logprob": -0.5,
            "first_rank": 1,
            "topk_tokens": (5, 6),
            "topk_logprobs": (-0.5, -1.5),
            "drafts": (9,),
        }
        state = HandoffState(**(fields | over))
        rng = np.random.default_rng(handle & 0xFFFF)
        shape = (-(-n_cached // 8), 2, 8, 4)
        return Handoff(state, tuple(rng.standard_normal(shape, np.float32) for _ in range(6)))

    return make


class Counted(float):
    """A time that counts how often something is compared with it."""

    compared = 0

    def _count(self) -> None:
        type(self).compared += 1

    def __lt__(self, other: float) -> bool:
        self._count()
        return float(self) < other

    def __le__(self, other: float) -> bool:
        self._count()
        return float(self) <= other

    def __gt__(self, other: float) -> bool:
        self._count()
        return float(self) > other

    def __ge__(self, other: float) -> bool:
        self._count()
        return float(self) >= other


@pytest.fixture
def counted_time() -> type[Counted]:
    """Return times that count: what they are compared with is what a book has looked at."""
    Counted.compared = 0
    return Counted
