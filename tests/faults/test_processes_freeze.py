"""SIGSTOP for ten seconds: whoever cannot answer is replaced, and harms nobody when it is back."""

from __future__ import annotations

import threading
from functools import partial
from operator import le
from pathlib import Path

import pytest

from baton_faults.fleet import wait_until
from baton_faults.steady import (
    assert_records_are_right,
    assert_whole_at_once,
    recorded_fleet,
    steady,
    wait_served,
)

pytestmark = pytest.mark.e2e

FROZEN_SECONDS = 10.0
"""Longer than `link.dead_after_seconds`, so that the process is given up meanwhile: a busy machine
may need longer for that, and is waited for, since who has no time himself calls nobody silent.
"""


def test_frozen_workers_lose_no_request(tmp_path: Path) -> None:
    with recorded_fleet(tmp_path) as running:
        with steady(running, at_least=300) as load:
            gateway = running["gateway"]
            for n_given_up, name in enumerate(("decode-0", "prefill-0"), 1):
                wait_served(load, 30)
                running.freeze(name)
                threading.Event().wait(FROZEN_SECONDS)
                wait_until(
                    f"the gateway has given {name} up",
                    lambda: gateway.metric("baton_link_workers_down_total", reason="silent"),
                    partial(le, n_given_up),
                )
                running.thaw(name)
                running.wait_usable()
        assert_whole_at_once(load)
        assert gateway.metric("baton_gateway_retries_total") > 0
        running.wait_empty()
        assert_records_are_right(running, load)


def test_a_frozen_gateway_loses_no_request(tmp_path: Path) -> None:
    with recorded_fleet(tmp_path) as running:
        with steady(running, at_least=200) as load:
            wait_served(load, 30)
            running.freeze("gateway")
            threading.Event().wait(FROZEN_SECONDS)
            wait_until(
                "the workers have given the gateway up",
                lambda: min(
                    running[name].metric("baton_link_heartbeat_timeouts_total")
                    for name in running.workers
                ),
                partial(le, 1),
            )
            running.thaw("gateway")
            wait_served(load, 60)
        assert_whole_at_once(load)
        running.wait_usable()
        running.wait_empty()
        assert_records_are_right(running, load)
