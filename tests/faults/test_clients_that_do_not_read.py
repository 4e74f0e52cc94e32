"""Clients that never read their streams, or read and leave: others are served, nothing is kept."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from baton_faults.fleet import MODEL, fleet, wait_until
from baton_faults.floods import connect, long_ask
from baton_faults.steady import (
    ENGINE,
    assert_flat,
    assert_whole_at_once,
    footprint,
    steady,
    wait_served,
)

pytestmark = pytest.mark.e2e

N_DEAF = 40


def deaf(url: str, number: int) -> socket.socket:
    """Ask for a long stream over a connection that takes next to nothing."""
    found = connect(url, 4096)
    long_ask(found, MODEL.name, number)
    return found


def test_clients_that_never_read_cost_others_nothing_and_leave_nothing(tmp_path: Path) -> None:
    with fleet(tmp_path, engine=ENGINE, num_speculative_tokens=2) as running:
        with steady(running, at_least=40) as warm:
            wait_served(warm, 40)
        before = footprint(running, "gateway")
        connections = [deaf(running.url, number) for number in range(N_DEAF)]
        gateway = running["gateway"]
        wait_until(
            "the streams have begun",
            lambda: gateway.metric("baton_gateway_live_requests"),
            lambda live: live >= N_DEAF,
        )
        started = time.monotonic()
        with steady(running, at_least=150, n_open=8, first=10_000) as load:
            wait_served(load, 150)
        print(f"150 requests beside {N_DEAF} deaf ones in {time.monotonic() - started:.1f} s")
        assert_whole_at_once(load)
        for connection in connections:
            connection.close()
        assert_flat(before, footprint(running, "gateway"))
