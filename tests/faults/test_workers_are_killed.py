"""kill -9 of each worker in turn at steady load: no request is lost, doubled or mixed up.

Two prefills and two decodes, so that every request can go on elsewhere. The next worker is killed
when the last one is back, for a request is tried on two workers and no more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_faults.steady import (
    assert_flat,
    assert_records_are_right,
    assert_whole_at_once,
    footprint,
    recorded_fleet,
    steady,
    wait_served,
)

pytestmark = pytest.mark.e2e

N_REQUESTS = 1000
ROUNDS = 2


def test_killed_workers_lose_no_request_and_leave_nothing_in_the_gateway(tmp_path: Path) -> None:
    with recorded_fleet(tmp_path) as running:
        with steady(running, at_least=100) as warm:
            wait_served(warm, 100)
        before = footprint(running, "gateway")
        with steady(running, N_REQUESTS, first=10_000) as load:
            for name in ("decode-0", "prefill-0", "decode-1", "prefill-1") * ROUNDS:
                wait_served(load, 30)
                running.kill(name)
                running.start(name)
                running.wait_usable()
        assert_whole_at_once(load)
        gateway = running["gateway"]
        assert gateway.metric("baton_gateway_retries_total") > 0, "nobody was in a killed worker"
        assert gateway.metric("baton_gateway_overlap_mismatches_total") == 0
        assert_flat(before, footprint(running, "gateway"))
        assert_records_are_right(running, warm, load)
