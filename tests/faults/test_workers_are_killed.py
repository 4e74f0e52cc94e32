"""kill -9 of each worker in turn at steady load: no request is lost, doubled or mixed up.

Two prefills and two decodes, so that every request can go on elsewhere. The next worker is killed
when the last one is back, for a request is tried on two workers and no more.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import msgspec
import pytest

from baton_faults.fleet import Fleet, wait_until
from baton_faults.steady import (
    ENGINE,
    N_OPEN,
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


WAYS: dict[str, dict[str, bool]] = {"zmq": {}, "shm": {"share_kv": True}, "nixl": {"nixl": True}}


@pytest.mark.parametrize("way", WAYS)
def test_killed_workers_lose_no_request_and_leave_nothing_in_the_gateway(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "nixl":
        pytest.importorskip("nixl_cu13")
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    engine = msgspec.structs.replace(ENGINE, prefill_chunk_tokens=16)  # so that some is read ahead
    with recorded_fleet(tmp_path, engine=engine, **WAYS[way]) as running:
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
        running.wait_empty()
        read = running["prefill-0"].metric("baton_handoff_delivered_bytes_total", transport=way)
        assert read > 0
        if way == "zmq":
            assert read_ahead(running) == 0
        else:
            # How much is computed when decode looks for it is a matter of the machine's pace.
            firsts = count(20_000, N_OPEN)
            wait_until(
                "some is read ahead", lambda: asked_more(running, next(firsts)), lambda n: n > 0
            )


def read_ahead(running: Fleet) -> float:
    return running["decode-0"].metric("baton_engine_kv_pulled_blocks_total", when="ahead")


def asked_more(running: Fleet, first: int) -> float:
    """Return what decode has read ahead, after some requests more if that is nothing."""
    if not read_ahead(running):
        with steady(running, N_OPEN, first=first):
            pass
    return read_ahead(running)
