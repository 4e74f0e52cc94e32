"""Sixteen times as many requests as decode has slots, all at once: they wait, and nothing fails."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import pytest

from baton_faults.fleet import Fleet, fleet
from baton_faults.load import Ask, Clients
from baton_faults.steady import ENGINE, assert_right, assert_whole_at_once, clients_of
from baton_worker.config import SimConfig

pytestmark = pytest.mark.e2e

SLOTS, TIMES = 4, 16
N_TOKENS = 60
STEP_SECONDS = 0.03
LEAST_SHARE = 0.5
"""Of the throughput without a queue. Measured alone it is above 0.9; a busy machine costs both."""


def asks(count: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    return [Ask(tuple(rng.randrange(8, 512) for _ in range(12)), N_TOKENS) for _ in range(count)]


def timed(clients: Clients, count: int, seed: int) -> float:
    """Return tokens a second of so many requests at once."""
    started = time.monotonic()
    clients.all_at_once(asks(count, seed), name=f"s{seed}-")
    return count * N_TOKENS / (time.monotonic() - started)


def places_moved(clients: Clients, prefix: str) -> int:
    """Return by how many places a first token came out of its turn, at most."""
    log = clients.log
    arrived = [name for name in log.asked_at if name.startswith(prefix)]
    served = sorted(arrived, key=log.first_at.__getitem__)
    return max(abs(place - served.index(name)) for place, name in enumerate(arrived))


def saturated(running: Fleet) -> Clients:
    clients = clients_of(running)
    alone = timed(clients, SLOTS, seed=1)
    crowded = timed(clients, SLOTS * TIMES, seed=2)
    print(f"tokens/s: {alone:.0f} with {SLOTS} streams, {crowded:.0f} with {SLOTS * TIMES}")
    assert_right(running, clients.log)
    assert_whole_at_once(clients)
    assert crowded >= LEAST_SHARE * alone
    return clients


@pytest.mark.parametrize("n_decode", [1, 2])
def test_requests_beyond_the_slots_wait_their_turn_and_none_is_recomputed(
    tmp_path: Path, n_decode: int
) -> None:
    pace = SimConfig(decode_step_seconds=STEP_SECONDS)
    engine = msgspec.structs.replace(ENGINE, sim=pace, max_running=SLOTS // n_decode)
    with fleet(tmp_path, engine=engine, decode=n_decode, num_speculative_tokens=0) as running:
        clients = saturated(running)
        assert places_moved(clients, "s2-") <= 2 * SLOTS
        running.wait_empty()
        gateway = running["gateway"]
        assert gateway.metric("baton_gateway_retries_total") == 0
        for name in running.workers:
            assert running[name].metric("baton_engine_preemptions_total") == 0
            assert running[name].metric("baton_worker_refused_total") == 0
