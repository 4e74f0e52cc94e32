"""The other host vanishes for a while, in both directions or in one, or its connections are reset.

A decode worker on this side takes over what was there, so no client is told anything.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from operator import le
from pathlib import Path

import pytest

from baton_faults.fleet import wait_until
from baton_faults.hosts import two_hosts
from baton_faults.steady import assert_whole_at_once, steady, wait_served
from baton_faults.wire import Side, Weather
from baton_worker.config import LinkConfig

pytestmark = pytest.mark.e2e

CUT = Side(is_cut=True)
DEAD_AFTER_SECONDS = LinkConfig().dead_after_seconds
CASES = {
    "twenty seconds": (Weather(CUT, CUT), 20.0),
    "two seconds": (Weather(CUT, CUT), 2.0),
    "only towards it": (Weather(rightward=CUT), 8.0),
    "only from it": (Weather(leftward=CUT), 8.0),
    "resets": (Weather(resets=True), 2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cut_link_loses_no_request_and_heals(tmp_path: Path, name: str) -> None:
    weather, seconds = CASES[name]
    with two_hosts(tmp_path) as (running, between):
        gateway = running["gateway"]
        with steady(running, at_least=100) as load:
            wait_served(load, 30)
            between.set(weather)
            threading.Event().wait(seconds)
            # A busy machine may need longer: who has no time himself calls nobody silent.
            for counter in noticed(weather, seconds):
                wait_until(f"{counter} says so", partial(gateway.metric, counter), partial(le, 1))
            carried = between.heal()
            healed_at = time.monotonic()
            running.wait_usable()
            print(f"{name}: usable {time.monotonic() - healed_at:.2f} s after healing")
            wait_served(load, 30)
        assert_whole_at_once(load)
        if not weather.resets:
            assert carried.dropped_packets > 0
        running.wait_empty()


def noticed(weather: Weather, seconds: float) -> list[str]:
    """Return the gateway's counters that must rise while it lasts."""
    names = ["baton_link_disconnects_total"] if weather.resets else []
    if seconds > DEAD_AFTER_SECONDS:
        names.append("baton_link_workers_down_total")
    return names
