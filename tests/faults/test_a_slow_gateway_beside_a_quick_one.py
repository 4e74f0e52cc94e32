"""A gateway that stands still holds its own requests up, and none of another gateway's."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_faults.fleet import fleet
from baton_faults.ordinary import ask, loaded
from baton_faults.steady import (
    ENGINE,
    assert_flat,
    assert_right,
    assert_whole_at_once,
    footprint,
    steady,
    wait_served,
)

pytestmark = pytest.mark.e2e

FREEZES = 3


def test_it_costs_the_others_requests_nothing_and_the_workers_no_memory(tmp_path: Path) -> None:
    with fleet(tmp_path, has_two_gateways=True, engine=ENGINE, num_speculative_tokens=2) as running:
        url = running["gateway-1"].ready.url
        with steady(running, at_least=40) as warm:
            wait_served(warm, 40)
        before = {name: footprint(running, name) for name in running.workers}
        with loaded(running, lambda n: ask("slow", [200], n), 8, url) as held_up:
            for n in range(FREEZES):
                running.freeze("gateway-1")
                with steady(running, at_least=40, first=1000 * (1 + n)) as load:
                    wait_served(load, 40)
                assert_whole_at_once(load)
                running.thaw("gateway-1")
                wait_served(held_up, 1)
        assert_right(running, held_up.log)
        for name in running.workers:
            assert_flat(before[name], footprint(running, name))
