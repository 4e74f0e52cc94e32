"""kill -9 of one decode worker of two: every stream goes on, token for token as if undisturbed."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

N_STREAMS = 6
N_TOKENS = 250
MOST_KILLS = 5
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

    def __init__(self, url: str, number: int, patience: float) -> None:
        super().__init__()
        self.url, self.number, self.patience = url, number, patience
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.problem = ""
        self.is_under_way = threading.Event()

    def run(self) -> None:
        asked = body(self.number) | {"stream": True}
        where = f"{self.url}/v1/completions"
        with httpx.stream("POST", where, json=asked, timeout=self.patience) as reply:
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


def kill_decode_amid_streams(deployment, wanted: list[Any], patience: float) -> None:
    """Every stream must go on exactly; the worker is replaced when this returns."""
    readers = [Reader(deployment.url, n, patience) for n in range(N_STREAMS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        assert reader.is_under_way.wait(patience), f"stream {reader.number} does not begin"
    pid = deployment.kill("decode")
    for reader in readers:
        reader.join(patience)
        assert not reader.is_alive(), f"stream {reader.number} does not end"
    assert [reader.problem for reader in readers] == [""] * N_STREAMS
    for reader, whole in zip(readers, wanted, strict=True):
        assert reader.tokens == whole["token_ids"], reader.number
        assert reader.logprobs == pytest.approx(whole["logprobs"]["token_logprobs"], abs=5e-5)
    deployment.wait_restarted("decode", pid)


def test_every_stream_of_a_killed_decode_goes_on_exactly(start_deployment, patience):
    with start_deployment("-k", "2", "--decode", "2") as deployment:
        deployment.wait_lines(4)
        wanted = [deployment.complete(**body(n))["choices"][0] for n in range(N_STREAMS)]
        retried = 0.0
        for _ in range(MOST_KILLS):
            kill_decode_amid_streams(deployment, wanted, patience)
            retried = deployment.metric("gateway", "baton_gateway_retries_total", how="from_token")
            if retried:
                break  # else each stream of that worker had ended before it was killed
        assert 1 <= retried <= N_STREAMS
        assert deployment.metric("gateway", "baton_gateway_overlap_mismatches_total") == 0
        for role in ("prefill", "decode"):
            deployment.wait_metric(role, "baton_engine_kv_blocks_used", 0)
            deployment.wait_metric(role, "baton_live_requests", 0)
        deployment.wait_metric("gateway", "baton_gateway_live_requests", 0)
