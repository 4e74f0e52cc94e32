"""A decode worker's step never comes back, while its heartbeats, probes and KV port go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from baton_faults.fleet import HTTP, Process, Start, fleet, wait_until
from baton_faults.steady import ENGINE, assert_whole_at_once, steady, wait_served
from baton_worker.faults import EXIT_FAULT

pytestmark = pytest.mark.e2e

N_REQUESTS = 120
DOWN = "baton_link_workers_down_total"


def is_not_ready(process: Process) -> bool:
    """Whether its probe says so, or nobody answers any more."""
    try:
        return HTTP.get(process.ready.metrics_url.replace("/metrics", "/readyz")).status_code == 503
    except httpx.TransportError:
        return True


def test_its_requests_go_on_elsewhere_and_it_ends_and_says_what_it_was_at(tmp_path: Path) -> None:
    switch = tmp_path / "hang"

    def may_hang(name: str, start: Start) -> Start:
        if name != "decode-0":
            return start
        engine = msgspec.structs.replace(start.config.engine, first_step_seconds=10.0)
        config = msgspec.structs.replace(start.config, engine=engine)
        return replace(start, config=config, program=("-m", "baton_faults.hanging", str(switch)))

    with fleet(tmp_path, may_hang, engine=ENGINE, prefill=2, decode=2) as running:
        with steady(running, at_least=N_REQUESTS) as load:
            wait_served(load, 40)
            hung = running["decode-0"]
            switch.touch()
            wait_until("it is not ready", lambda: is_not_ready(hung), bool)
            wait_until("it ends", hung.popen.poll, lambda code: code is not None)
            assert hung.popen.poll() == EXIT_FAULT
            switch.unlink()
            running["gateway"].wait_metric(DOWN, 1, reason="disconnected")
            wait_served(load, 20)
            running.start("decode-0")
            running.wait_usable()
        assert_whole_at_once(load)
        said = (tmp_path / "decode-0.log").read_text().splitlines()
        assert any("the engine makes no progress" in line for line in said), said
        last = next(line for line in said if "the engine is stuck" in line)
        assert "n_requests=0" not in last, last
        running.wait_empty()
