"""500 concurrent requests of every kind end exactly once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random

import httpx

from baton_testing.unsupervised import unsupervised
from baton_worker.config import EngineConfig

REQUESTS = 500
OPEN_AT_ONCE = 250


def body(n: int) -> dict:
    rng = random.Random(n)
    kind = n % 5
    request = {
        "model": "tiny-mtp",
        "prompt": [rng.randrange(8, 512) for _ in range(rng.choice([1, 7, 40, 200]))],
        "max_tokens": rng.choice([1, 2, 8, 30]),
        "seed": n,
        "stream": kind != 0,
        "return_token_ids": True,
        "stream_options": {"include_usage": True} if kind != 0 else None,
        "logprobs": rng.choice([None, 0, 3, 5]),
        "temperature": rng.choice([0, 0.7, 1.0]),
    }
    if kind == 2:
        request["stop"] = [" the", "e"]
    if kind == 3:
        request |= {"ignore_eos": True, "max_tokens": 60}
    if kind == 4:
        request |= {"ignore_eos": True, "max_tokens": 800}  # its client leaves early
    return {key: value for key, value in request.items() if value is not None}


async def whole(client: httpx.AsyncClient, request: dict) -> str:
    reply = await client.post("/v1/completions", json=request)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    choice = answer["choices"][0]
    check(request, choice["token_ids"], choice.get("logprobs"), answer["usage"])
    return str(choice["finish_reason"])


async def streamed(client: httpx.AsyncClient, request: dict, leave_after: int | None) -> str:
    tokens: list[int] = []
    logprobs: list[float] = []
    finishes: list[str] = []
    usage = None
    async with client.stream("POST", "/v1/completions", json=request) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
                if choice.get("logprobs"):
                    logprobs += choice["logprobs"]["token_logprobs"]
                if choice.get("finish_reason"):
                    finishes.append(choice["finish_reason"])
            if leave_after is not None and len(tokens) >= leave_after:
                return "left"
    assert len(finishes) == 1, finishes
    check(request, tokens, {"token_logprobs": logprobs}, usage)
    return finishes[0]


def check(request: dict, tokens: list[int], logprobs: dict | None, usage: dict | None) -> None:
    assert 1 <= len(tokens) <= request["max_tokens"]
    assert usage is not None
    assert usage["completion_tokens"] == len(tokens)
    if "logprobs" in request:
        assert logprobs is not None
        assert len(logprobs["token_logprobs"]) == len(tokens)


async def run_all(url: str) -> list[str]:
    gate = asyncio.Semaphore(OPEN_AT_ONCE)
    limits = httpx.Limits(max_connections=OPEN_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def one(n: int) -> str:
            request = body(n)
            async with gate:
                if not request["stream"]:
                    return await whole(client, request)
                return await streamed(client, request, 3 if n % 5 == 4 else None)

        return await asyncio.gather(*(one(n) for n in range(REQUESTS)))


async def test_500_mixed_requests_each_end_once_and_leave_nothing(tmp_path):
    # 400 blocks hold some twenty of the longest requests: most others wait or are preempted.
    engine = EngineConfig(kv_blocks=400, max_running=24)
    with unsupervised(tmp_path, num_speculative_tokens=2, engine=engine) as processes:
        outcomes = await run_all(processes.url)
        assert outcomes.count("left") == REQUESTS // 5
        assert set(outcomes) <= {"left", "stop", "length"}
        for name in ("prefill-0", "decode-0"):
            processes[name].wait_metric("baton_engine_kv_blocks_used", 0)
            processes[name].wait_metric("baton_live_requests", 0)
            processes[name].wait_metric("baton_engine_running_requests", 0)
            processes[name].wait_metric("baton_engine_held_handoffs", 0)
        processes["decode-0"].wait_metric("baton_reserved_requests", 0)
        gateway = processes["gateway"]
        gateway.wait_metric("baton_gateway_live_requests", 0)
        gateway.wait_metric("baton_gateway_requests_total", REQUESTS)
        assert gateway.metric("baton_gateway_gap_timeouts_total") == 0


async def test_a_full_deployment_answers_429_and_serves_again_after(tmp_path, patience):
    engine = EngineConfig(max_running=1, max_waiting=1)
    # Nobody waits in line: whether the queues are full is then a matter of these workers alone.
    gateway = {"max_wait_seconds": 0.0}
    with unsupervised(tmp_path, gateway=gateway, engine=engine) as processes:
        request = {"model": "tiny-mtp", "prompt": "x", "max_tokens": 200, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=processes.url, timeout=patience) as client:
            posts = (client.post("/v1/completions", json=request) for _ in range(24))
            replies = await asyncio.gather(*posts)
        codes = [reply.status_code for reply in replies]
        assert set(codes) <= {200, 429}, codes
        assert 200 in codes
        assert 429 in codes
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"]
        short = {"model": "tiny-mtp", "prompt": "x", "max_tokens": 2}
        async with httpx.AsyncClient(base_url=processes.url, timeout=patience) as client:
            served = await client.post("/v1/completions", json=short)
        assert served.json()["usage"]["completion_tokens"] >= 1
