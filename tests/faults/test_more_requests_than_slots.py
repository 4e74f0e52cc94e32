"""Sixteen times as many requests as decode has slots, all at once: they wait, and nothing fails."""

from __future__ import annotations

import random
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


def asks(count: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    return [Ask(tuple(rng.randrange(8, 512) for _ in range(12)), N_TOKENS) for _ in range(count)]


def places_moved(clients: Clients, prefix: str) -> int:
    """Return by how many places a first token came out of its turn, at most."""
    log = clients.log
    arrived = [name for name in log.asked_at if name.startswith(prefix)]
    served = sorted(arrived, key=log.first_at.__getitem__)
    return max(abs(place - served.index(name)) for place, name in enumerate(arrived))


def saturated(running: Fleet) -> Clients:
    clients = clients_of(running)
    clients.all_at_once(asks(SLOTS * TIMES, seed=2), name="s2-")
    assert_right(running, clients.log)
    assert_whole_at_once(clients)
    return clients


@pytest.mark.parametrize("n_pairs", [1, 2])
def test_requests_beyond_the_slots_wait_their_turn_and_none_is_recomputed(
    tmp_path: Path, n_pairs: int
) -> None:
    pace = SimConfig(decode_step_seconds=STEP_SECONDS)
    engine = msgspec.structs.replace(ENGINE, sim=pace, max_running=SLOTS // n_pairs)
    pairs = {"prefill": n_pairs, "decode": n_pairs, "num_speculative_tokens": 0}
    with fleet(tmp_path, engine=engine, **pairs) as running:
        clients = saturated(running)
        if n_pairs == 1:  # lines of several decode workers move on by themselves
            assert places_moved(clients, "s2-") <= 2 * SLOTS
        running.wait_empty()
        gateway = running["gateway"]
        assert gateway.metric("baton_gateway_retries_total") == 0
        for name in running.workers:
            assert running[name].metric("baton_engine_preemptions_total") == 0
            assert running[name].metric("baton_worker_refused_total") == 0
