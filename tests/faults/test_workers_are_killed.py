"""kill -9 of each worker in turn at steady load: no request is lost, doubled or mixed up.

Two prefills and two decodes, so that every request can go on elsewhere. The next worker is killed
when the last one is back, for a request is tried on two workers and no more.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_faults.fleet import Fleet, wait_until
from baton_faults.steady import (
    ENGINE,
    N_OPEN,
    PACE,
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


WAYS: dict[str, dict[str, Any]] = {
    "zmq": {},
    "shm": {"share_kv": True},
    "nixl": {"nixl": True},
    "decode helps": {"decode_prompts_behind": 1},
}
SLOW_PREFILL = msgspec.structs.replace(PACE, prefill_token_seconds=2e-3)
HELPED = {"decode_prompt_chunk_tokens": 16, "sim": SLOW_PREFILL}


@pytest.mark.parametrize("way", WAYS)
def test_killed_workers_lose_no_request_and_leave_nothing_in_the_gateway(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "nixl":
        pytest.importorskip("nixl_cu13")
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    helps = HELPED if way == "decode helps" else {}
    engine = msgspec.structs.replace(
        ENGINE,
        prefill_chunk_tokens=16,  # so that some is read ahead
        **helps,
    )
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
        by_decode = gateway.metric("baton_gateway_prompts_total", worker_role="decode")
        assert bool(by_decode) is bool(helps)
        assert_flat(before, footprint(running, "gateway"))
        assert_records_are_right(running, warm, load)
        running.wait_empty()
        transport = "zmq" if helps else way
        prefill = running["prefill-0"]
        assert prefill.metric("baton_handoff_delivered_bytes_total", transport=transport) > 0
        if transport == "zmq":
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
