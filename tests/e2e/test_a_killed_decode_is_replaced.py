"""kill -9 of one decode worker of two: every stream goes on, token for token as if undisturbed."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

N_STREAMS = 6
N_TOKENS = 250
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.9, "logit_bias": {"40": -5}},
]


def body(number: int) -> dict[str, Any]:
    return {
        "model": "tiny-mtp",
        "prompt": f"The licensor grants {number}",
        "max_tokens": N_TOKENS,
        "ignore_eos": True,
        "seed": number,
        "logprobs": 2,
        "return_token_ids": True,
        **WAYS[number % len(WAYS)],
    }


class Reader(threading.Thread):
    """One stream: its tokens and logprobs, and what went wrong."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self.url, self.number = url, number
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.problem = ""
        self.is_under_way = threading.Event()

    def run(self) -> None:
        asked = body(self.number) | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.take(json.loads(line.removeprefix("data: ")))
        self.is_under_way.set()

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.problem = chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            self.tokens += choice["token_ids"]
            self.logprobs += choice["logprobs"]["token_logprobs"]
        if len(self.tokens) > 20:
            self.is_under_way.set()


@pytest.mark.timeout(180)
def test_every_stream_of_a_killed_decode_goes_on_exactly(start_deployment):
    with start_deployment("-k", "2", "--decode", "2") as deployment:
        deployment.wait_lines(4)
        wanted = [deployment.complete(**body(n))["choices"][0] for n in range(N_STREAMS)]
        readers = [Reader(deployment.url, n) for n in range(N_STREAMS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            assert reader.is_under_way.wait(30)
        pid = deployment.kill("decode")
        for reader in readers:
            reader.join(60)
        assert [reader.problem for reader in readers] == [""] * N_STREAMS
        for reader, whole in zip(readers, wanted, strict=True):
            assert reader.tokens == whole["token_ids"], reader.number
            assert reader.logprobs == pytest.approx(whole["logprobs"]["token_logprobs"], abs=5e-5)
        retried = deployment.metric("gateway", "baton_gateway_retries_total", how="from_token")
        assert 1 <= retried <= N_STREAMS
        assert deployment.metric("gateway", "baton_gateway_overlap_mismatches_total") == 0
        deployment.wait_restarted("decode", pid)
        for role in ("prefill", "decode"):
            deployment.wait_metric(role, "baton_engine_kv_blocks_used", 0)
            deployment.wait_metric(role, "baton_live_requests", 0)
        deployment.wait_metric("gateway", "baton_gateway_live_requests", 0)
