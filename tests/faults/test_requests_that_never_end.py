"""Headers and bodies without end, and requests that trickle in: refused, bounded, harmless."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from baton_faults.fleet import Fleet, Start, fleet
from baton_faults.floods import BEGINNINGS, FLOODS, connect, pour
from baton_faults.steady import (
    ENGINE,
    assert_flat,
    assert_whole_at_once,
    footprint,
    steady,
    wait_served,
)

pytestmark = pytest.mark.e2e

FLOOD_BYTES = 64 << 20
N_SLOW = 60


def status_of(connection: socket.socket) -> int:
    """Return the status that it answered with; 0 if it only closed the connection."""
    with contextlib.suppress(ConnectionError):
        line = connection.recv(4096).split(b"\r\n")[0]
        return int(line.split()[1]) if line else 0
    return 0


def patient_for_ten_seconds(name: str, start: Start) -> Start:
    """Let a trickling body be ended as soon as trickling headers are."""
    gateway = start.config.gateway
    limits = msgspec.structs.replace(gateway.http.limits, body_seconds=10.0)
    http = msgspec.structs.replace(gateway.http, limits=limits)
    gateway = msgspec.structs.replace(gateway, http=http)
    return replace(start, config=msgspec.structs.replace(start.config, gateway=gateway))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path, patient_for_ten_seconds, engine=ENGINE) as found:
        yield found


def test_floods_are_refused_and_take_no_memory(running: Fleet) -> None:
    with steady(running, at_least=40) as warm:
        wait_served(warm, 40)
    before = footprint(running, "gateway")
    with steady(running, at_least=60, first=10_000) as load:
        for name, (head, piece, answers) in FLOODS.items():
            with contextlib.closing(connect(running.url)) as connection:
                sent = pour(connection, head, piece, FLOOD_BYTES)
                status = status_of(connection)
            print(f"{name}: {status} after {sent} bytes")
            assert status in answers, name
        wait_served(load, 30)
    assert_whole_at_once(load)
    assert_flat(before, footprint(running, "gateway"))
    assert running["gateway"].metric("baton_http_refused_total") >= len(FLOODS)


@pytest.mark.parametrize("said", BEGINNINGS)
def test_requests_that_trickle_in_are_ended_and_cost_others_nothing(
    running: Fleet, said: str
) -> None:
    before = footprint(running, "gateway")
    slow = [connect(running.url) for _ in range(N_SLOW)]
    for connection in slow:
        connection.sendall(BEGINNINGS[said])
    with steady(running, at_least=100) as load:
        wait_served(load, 100)
    assert_whole_at_once(load)
    assert {status_of(connection) for connection in slow} <= {0, 408}
    for connection in slow:
        connection.close()
    assert_flat(before, footprint(running, "gateway"))
    assert running["gateway"].metric("baton_http_refused_total") >= N_SLOW
