"""Shared by the link's tests: columns to publish, metrics to read, configurations for loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, LinkConfig
from baton_worker.identity import GatewayIdentity, Role, make_handle
from baton_worker.link.api import GatewayUp, StepReceived, WorkerUp
from baton_worker.link.gateway import ZmqGatewayLink
from baton_worker.link.worker import ZmqWorkerLink
from baton_worker.messages import WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import Finish, StepColumns

SEMANTIC_HASH = 0xBA70


def make_columns(
    incarnation: int, counters: list[int], *, n_tokens: int = 1, finish: Finish = Finish.NONE
) -> StepColumns:
    """One row per counter, its handle made of it; every token is the counter's low bits."""
    n = len(counters)
    return StepColumns(
        handle=np.array([make_handle(incarnation, counter) for counter in counters], np.uint64),
        position=np.zeros(n, np.uint32),
        n_tokens=np.full(n, n_tokens, np.uint8),
        width=np.zeros(n, np.uint8),
        flags=np.full(n, int(finish), np.uint8),
        attempt=np.zeros(n, np.uint8),
        token=np.repeat(np.array(counters, np.int64) & 0xFF, n_tokens).astype(np.int32),
        logprob=np.empty(0, np.float32),
        rank=np.empty(0, np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
    )


@pytest.fixture(scope="session")
def columns() -> Callable[..., StepColumns]:
    return make_columns


@pytest.fixture(scope="session")
def new_factory() -> Callable[..., MetricFactory]:
    return lambda role="decode": MetricFactory(CollectorRegistry(), "tiny", role)


@pytest.fixture(scope="session")
def read_metric() -> Callable[..., float]:
    def read(factory: MetricFactory, name: str, **labels: str) -> float:
        labels = {"model": factory.model, "role": factory.role, **labels}
        return factory.registry.get_sample_value(name, labels) or 0.0

    return read


@pytest.fixture(scope="session")
def new_info() -> Callable[..., WorkerInfo]:
    def build(worker_id: str = "decode-0", **changes: object) -> WorkerInfo:
        facts = {
            "role": int(Role.DECODE),
            "wire_min": 1,
            "wire_max": 1,
            "semantic_hash": SEMANTIC_HASH,
            "config_hash": "c0",
            "revision": "",
            "model": "tiny",
            "vocab_size": 256,
            "max_model_len": 128,
            "max_top_k": 20,
            "max_running": 8,
            "max_waiting": 8,
            "kv_capacity_tokens": 1024,
        }
        return WorkerInfo(worker_id=worker_id, **(facts | changes))

    return build


@pytest.fixture(scope="session")
def link_config() -> Callable[..., LinkConfig]:
    """Loopback without CURVE; keyword arguments replace fields."""

    def build(**changes: object) -> LinkConfig:
        fields = {"bind": "tcp://127.0.0.1:0", "curve": CurveConfig(enabled=False)}
        return LinkConfig(**(fields | changes))

    return build


class Log:
    """Events in order of arrival, and a way to wait for a condition on them."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._changed = threading.Condition()

    def add(self, *events: object) -> None:
        with self._changed:
            self.events.extend(events)
            self._changed.notify_all()

    def of(self, kind: type) -> list[object]:
        with self._changed:
            return [event for event in self.events if isinstance(event, kind)]

    def wait(self, claim: Callable[[Log], bool], seconds: float = 300.0) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: claim(self), seconds):
                pytest.fail(f"not within {seconds} s; events end in {self.events[-5:]}")

    def wait_until(self, claim: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait for what no event tells, such as a counter."""
        deadline = time.monotonic() + seconds
        while not claim():
            if time.monotonic() >= deadline:
                pytest.fail(f"not within {seconds} s; events end in {self.events[-5:]}")
            time.sleep(0.01)

    def wait_for(self, kind: type, count: int = 1, seconds: float = 300.0) -> list[object]:
        self.wait(lambda log: len(log.of(kind)) >= count, seconds)
        return self.of(kind)


class RunningGateway:
    """A gateway link whose consumer applies at once, unless `applies` is cleared."""

    def __init__(
        self, link: ZmqGatewayLink, factory: MetricFactory, identity: GatewayIdentity
    ) -> None:
        self.link = link
        self.identity = identity
        self.factory = factory
        self.log = Log()
        self.applies = True

    def take(self, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, StepReceived) and self.applies:
                self.link.applied(event.worker_id, event.meta.epoch, event.meta.seq)
        self.log.add(*events)

    def rows(self) -> list[int]:
        steps = self.log.of(StepReceived)
        return [h & 0xFFFFFFFFFF for step in steps for h in step.columns.handle.tolist()]


class RunningWorker:
    def __init__(self, link: ZmqWorkerLink, factory: MetricFactory) -> None:
        self.link = link
        self.factory = factory
        self.log = Log()


@pytest.fixture
def start_gateway(link_config, new_factory) -> Iterator[Callable[..., RunningGateway]]:
    with contextlib.ExitStack() as running:

        def start(incarnation: int = 77, **changes: object) -> RunningGateway:
            factory = new_factory("gateway")
            identity = GatewayIdentity(incarnation)
            link = ZmqGatewayLink(link_config(**changes), identity, factory)
            gateway = RunningGateway(link, factory, identity)
            link.start(gateway.take)
            running.callback(link.close)
            return gateway

        yield start


@pytest.fixture
def start_worker(link_config, new_factory, new_info) -> Iterator[Callable[..., RunningWorker]]:
    with contextlib.ExitStack() as running:

        def start(
            *endpoints: str, info: dict[str, object] | None = None, **changes: object
        ) -> RunningWorker:
            factory = new_factory()
            config = link_config(gateways=endpoints, **changes)
            link = ZmqWorkerLink(config, new_info(**(info or {})), factory)
            worker = RunningWorker(link, factory)
            link.start(worker.log.add)
            running.callback(link.close, 0.0)
            return worker

        yield start


@pytest.fixture
def pair(start_gateway, start_worker):
    """A gateway and a worker that are linked."""
    gateway = start_gateway()
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    gateway.log.wait_for(WorkerUp)
    return gateway, worker
