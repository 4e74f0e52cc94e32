"""500 mixed requests: each ends once, and every map, account and worker is empty afterwards."""

import asyncio
import random

import httpx
import pytest

from baton_worker.identity import Role

WORDS = "the quick brown fox jumps over the lazy dog and a stop here"


def request_body(random_state, i):
    body = {"model": "tiny", "prompt": WORDS[: random_state.randint(1, 50)], "max_tokens": 30}
    body |= random_state.choice([{}, {"logprobs": 0}, {"logprobs": 3}])
    body |= random_state.choice([{}, {"stop": ["o", "fo"]}, {"n": 2}])
    return body | {"stream": i % 2 == 0}


async def one(client, random_state, i, outcomes):
    body = request_body(random_state, i)
    leaves = i % 7 == 0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if leaves:
                return
            text = (await answer.aread()).decode()
    except httpx.HTTPError as error:
        raise AssertionError(f"request {i} failed: {error}") from error
    outcomes.append(answer.status_code)
    if answer.status_code == 200 and body["stream"]:
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"stop"') + text.count(
            '"finish_reason":"length"'
        ) == body.get("n", 1)


@pytest.mark.slow
async def test_500_mixed_requests_leave_no_trace(start_gateway):
    gateway = start_gateway(per_step=3)
    gateway.link.up("mixed-0", Role.MIXED)
    random_state, outcomes = random.Random(3), []

    limits = httpx.Limits(max_connections=64)
    patience = httpx.Timeout(120, pool=None)  # most of them wait for one of the connections
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=patience) as client:
        await asyncio.gather(*(one(client, random_state, i, outcomes) for i in range(500)))
    link = gateway.link
    link.wait_until(lambda: gateway.service.requests.is_empty, seconds=60)
    link.do(lambda: None)
    link.do(lambda: None)
    assert set(outcomes) == {200}
    assert len(outcomes) == 500 - len(range(0, 500, 7))
    assert link.held() == 0
    assert gateway.metric("baton_gateway_live_requests") == 0
    loads = gateway.service.workers.loads()
    assert {(load.outstanding_tokens, load.outstanding_requests) for load in loads} == {(0, 0)}
