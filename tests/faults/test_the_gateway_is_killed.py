"""kill -9 of the gateway at steady load: its streams break, and those who ask again are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_faults.history import WHOLE
from baton_faults.load import BROKEN, REFUSED
from baton_faults.steady import assert_flat, ends_of, footprint, recorded_fleet, steady, wait_served

pytestmark = pytest.mark.e2e

N_REQUESTS = 400
KILLS = 5


def test_a_killed_gateway_breaks_its_streams_and_leaves_nothing_in_the_workers(
    tmp_path: Path,
) -> None:
    with recorded_fleet(tmp_path) as running:
        with steady(running, at_least=50) as warm:
            wait_served(warm, 50)
        before = {name: footprint(running, name) for name in running.workers}
        with steady(running, N_REQUESTS, first=10_000) as load:
            for _ in range(KILLS):
                wait_served(load, 30)
                running.kill("gateway")
                running.start("gateway")
                running.wait_usable()
        ends = ends_of(load)
        assert set(ends) <= {WHOLE, BROKEN, f"{REFUSED}503"}, load.log.problems
        assert ends[BROKEN] >= KILLS, "each death broke streams, and a client sees that"
        assert ends[WHOLE] == load.served
        for name, held in before.items():
            assert_flat(held, footprint(running, name))
            assert running[name].metric("baton_link_disconnects_total") >= KILLS
