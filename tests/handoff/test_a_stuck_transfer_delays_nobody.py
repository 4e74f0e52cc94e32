"""A decode worker that takes no KV costs its own requests only; deliveries are timed (R31, R44)."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from baton_worker.engine.api import Handoff
from baton_worker.handoff.api import HandoffArrived, HandoffDelivered, HandoffFailed
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode

ALLOWED_DELAY_SECONDS = 0.010
N_STUCK, N_TIMED = 40, 15
MOST_TIMED = 300
"""A busy machine holds most of them up: only who is held up each time waits for the stuck ones."""


@pytest.fixture
def ends(handoff_end):
    return handoff_end(), handoff_end()


@pytest.fixture
def silent() -> Iterator[DecodeTarget]:
    """A port that accepts connections and never reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield DecodeTarget("silent", f"tcp://127.0.0.1:{port}")


def delivered_in(prefill: Any, decode: Any, handoff: Handoff) -> float:
    """Deliver a handoff; return the seconds that it took."""
    started = time.perf_counter()
    prefill.transport.offer(decode.target, handoff, 60.0)
    assert isinstance(decode.next(), HandoffArrived)
    decode.transport.acknowledge(handoff.state.key)
    delivered = prefill.next()
    taken = time.perf_counter() - started
    assert isinstance(delivered, HandoffDelivered)
    assert delivered.key == handoff.state.key
    return taken


def test_others_are_delivered_as_quickly_beside_stuck_transfers(
    ends, handoff_end, silent, make_handoff
):
    prefill, decode = ends
    calls = []
    for n in range(N_STUCK):
        handoff = make_handoff(handle=(1 << 40) + 1000 + n)
        started = time.perf_counter()
        prefill.transport.offer(silent, handoff, 600.0)
        calls.append(time.perf_counter() - started)
    assert sorted(calls)[N_STUCK // 2] < ALLOWED_DELAY_SECONDS, (
        "the engine thread waits for nothing"
    )
    # In turns, so that the machine is as busy for both; the shortest are the transport's own doing.
    free, alone, beside = handoff_end(), [], []
    for n in range(MOST_TIMED):
        alone.append(delivered_in(free, decode, make_handoff(handle=(1 << 40) + n)))
        beside.append(delivered_in(prefill, decode, make_handoff(handle=(2 << 40) + n)))
        if n >= N_TIMED and min(beside) - min(alone) < ALLOWED_DELAY_SECONDS:
            break
    assert min(beside) - min(alone) < ALLOWED_DELAY_SECONDS
    for n in range(N_STUCK):
        prefill.transport.cancel(RequestKey((1 << 40) + 1000 + n, 0))


def test_a_stuck_transfer_ends_at_its_deadline(ends, silent, make_handoff):
    prefill, _ = ends
    started = time.perf_counter()
    prefill.transport.offer(silent, make_handoff(), 0.3)
    failed = prefill.next()
    assert isinstance(failed, HandoffFailed)
    assert failed.code is ErrorCode.HANDOFF_TIMEOUT
    assert time.perf_counter() - started >= 0.3


def test_each_delivery_is_timed_from_offer_to_import(ends, make_handoff):
    prefill, decode = ends
    for n in range(N_TIMED):
        delivered_in(prefill, decode, make_handoff(handle=(1 << 40) + n))
    labels = {"model": "m", "role": "mixed"}
    value = prefill.registry.get_sample_value
    assert value("baton_handoff_seconds_count", labels) == N_TIMED
    whole = value("baton_handoff_seconds_sum", labels)
    parts = [value(f"baton_handoff_{part}_seconds_sum", labels) for part in ("transfer", "import")]
    assert min(parts) > 0, "the KV's way and decode's import are told apart"
    assert sum(parts) == pytest.approx(whole)
