"""A pair that shares KV pools says what one process says; who is killed leaves no pool behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from baton_testing.local_deployment import Deployment, start
from baton_testing.processes import HTTP, wait_until

CLIENTS = 8
FLAGS = {"shm": "--share-kv", "nixl": "--nixl"}


@pytest.fixture(scope="module", params=FLAGS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    return str(request.param)


@pytest.fixture(scope="module")
def sharing(way: str) -> Iterator[Deployment]:
    with start("-k", "2", FLAGS[way], "--curve", "--prefill-chunk", "16") as deployment:
        deployment.wait_lines(3)
        answers(deployment)  # words of filled KV are for connections that stand
        yield deployment


def answers(deployment: Deployment, turn: int = 0, **options: Any) -> list[tuple[Any, ...]]:
    """Return what is said of prompts that no other turn has."""
    begin = 13 * turn
    prompts = [[40 + (begin + 7 * n + i) % 400 for i in range(1 + 11 * n)] for n in range(CLIENTS)]
    asked = {"max_tokens": 20, "return_token_ids": True, "logprobs": 2} | options
    reply = deployment.complete(prompt=prompts, **asked)
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    return [(c["token_ids"], c["finish_reason"], c["logprobs"]["tokens"]) for c in choices]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}])
def test_its_answers_are_those_of_one_process(
    sharing: Deployment, mixed: Deployment, way: str, options: dict[str, Any]
) -> None:
    turns = count()

    def read() -> tuple[float, ...]:
        delivered = sharing.metric("prefill", "baton_handoff_delivered_bytes_total", transport=way)
        pulled = "baton_engine_kv_pulled_blocks_total"
        ahead, behind = (sharing.metric("decode", pulled, when=w) for w in ("ahead", "behind"))
        return delivered - before, ahead, behind

    def ask() -> tuple[float, ...]:
        turn = next(turns)
        assert answers(sharing, turn, **options) == answers(mixed, turn, **options)
        sharing.wait_idle("prefill", "decode")
        return read()

    before = 0.0
    before = read()[0]
    # How much of a prompt is read before it is whole, a busy machine has a say in.
    wait_until("KV is read, ahead and behind", ask, lambda seen: min(seen) > 0)
    assert sharing.metric("prefill", "baton_handoff_delivered_bytes_total", transport="zmq") == 0
    assert sharing.metric("prefill", "baton_handoff_sent_bytes_total") == 0
    assert sharing.metric("decode", "baton_handoff_mapped_pools") == 1
    readyz = sharing.latest("prefill")["metrics_url"].replace("/metrics", "/readyz")
    told = HTTP.get(readyz).json()
    assert told["kv_transports"] == {"decode-0": way}
    assert set(told["kv_rates"]) == ({"decode-0"} if way == "nixl" else set())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_is_killed_leaves_no_pool_mapped(sharing: Deployment, role: str) -> None:
    expected = answers(sharing, temperature=0)
    sharing.wait_metric("decode", "baton_handoff_mapped_pools", 1)
    sharing.wait_restarted(role, sharing.kill(role))
    if role == "prefill":
        sharing.wait_metric("decode", "baton_handoff_mapped_pools", 0)
    assert answers(sharing, temperature=0) == expected
    sharing.wait_metric("decode", "baton_handoff_mapped_pools", 1)
    sharing.wait_idle("prefill", "decode")
    assert sharing.metric("prefill", "baton_handoff_delivered_bytes_total", transport="zmq") == 0
    for name in ("prefill", "decode"):
        sharing.wait_metric(name, "baton_engine_kv_blocks_used", 0)
