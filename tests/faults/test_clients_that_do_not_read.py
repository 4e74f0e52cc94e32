"""Clients that never read their streams, or read and leave: others are served, nothing is kept."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton_faults.fleet import MODEL, fleet, wait_until
from baton_faults.load import Ask
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
N_TOKENS = 900


def deaf(url: str, number: int) -> socket.socket:
    """Ask for a long stream with all alternatives, over a connection that takes next to nothing."""
    ask = Ask((9, 10 + number, 11), N_TOKENS, extra=(("logprobs", 20),))
    body = json.dumps(ask.body(MODEL.name)).encode()
    where = urlsplit(url)
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect((where.hostname, where.port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    found.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
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
