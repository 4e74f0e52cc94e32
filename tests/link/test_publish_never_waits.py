"""`publish` is called by the engine thread: it must return at once whatever the network does."""

from __future__ import annotations

import resource
import threading
import time

import pytest

from baton_worker.link.api import GatewayUp

N_STEPS = 3000
PATIENCE_SECONDS = 300.0


@pytest.fixture
def worker(start_gateway, start_worker):
    gateway = start_gateway()
    gateway.applies = False
    worker = start_worker(gateway.link.endpoint, ring_bytes=1 << 20)
    worker.log.wait_for(GatewayUp)
    return worker


def test_publishing_waits_for_nothing_while_the_links_thread_stands_still(worker, columns) -> None:
    """Counted by the kernel: who waits gives the processor away, and is not robbed of it."""
    stands, may_go_on, went_on = threading.Event(), threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        may_go_on.wait(PATIENCE_SECONDS)
        went_on.set()

    worker.link._call(stand_still)
    assert stands.wait(PATIENCE_SECONDS)
    step = columns(77, list(range(64)))
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for step_id in range(N_STEPS):
        worker.link.publish(77, step, step_id)
    n_waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    stands_still = not went_on.is_set()
    may_go_on.set()
    assert stands_still, "all was published only when the link's thread went on"
    assert n_waits < N_STEPS / 100


def test_publishing_into_a_ring_that_nobody_empties_stays_fast(worker, columns) -> None:
    step = columns(77, list(range(64)))
    seconds = []
    for step_id in range(N_STEPS):
        before = time.perf_counter()
        worker.link.publish(77, step, step_id)
        seconds.append(time.perf_counter() - before)
    seconds.sort()
    # Structure, not speed: a network wait would be a heartbeat (1 s) or a retry (0.1 s). Of most,
    # since a busy machine makes some wait.
    assert seconds[N_STEPS // 2] < 0.01


def test_the_ring_is_bounded_even_when_the_ladder_is_ignored(worker, columns) -> None:
    for step_id in range(N_STEPS):
        worker.link.publish(77, columns(77, list(range(64))), step_id)
    (peer,) = worker.link._peers.values()
    assert peer.end.outbox.n_bytes <= 1 << 20
