"""One packet in a hundred lost, and 50 ms each way: everything arrives, only later."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_faults.hosts import AWAY, two_hosts
from baton_faults.steady import assert_whole_at_once, steady, wait_served
from baton_faults.wire import Side

pytestmark = pytest.mark.e2e

WEATHER = {
    "loss": Side(loss=0.01),
    "delay": Side(delay_seconds=0.05),
    "both": Side(loss=0.01, delay_seconds=0.05),
}


@pytest.mark.parametrize("name", WEATHER)
def test_a_bad_link_loses_no_request(tmp_path: Path, name: str) -> None:
    with two_hosts(tmp_path) as (running, between):
        between.both(WEATHER[name])
        with steady(running, at_least=150) as load:
            wait_served(load, 150)
        carried = between.heal()
        assert_whole_at_once(load)
        assert carried.leftward_bytes > 0
        assert (carried.dropped_packets > 0) == (WEATHER[name].loss > 0)
        received = running[AWAY].metric("baton_handoff_received_bytes_total")
        assert received > 0, "the other host took handoffs"
        running.wait_empty()
