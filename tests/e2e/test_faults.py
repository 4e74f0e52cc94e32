"""kill -9 of each process mid-stream: clean ends, nothing hangs, the next request is served."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

CALM_SECONDS = 5.0


@dataclass
class Reader:
    """One streaming client on a thread: what it got, how it ended, and when."""

    url: str
    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    finish: str = ""
    ended_at: float = 0.0
    started: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=60) as reply:
                for line in reply.iter_lines():
                    self.take(line)
        except httpx.HTTPError as error:
            self.error = type(error).__name__
        finally:
            self.started.set()
            self.ended_at = time.monotonic()

    def take(self, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.finish = choice.get("finish_reason") or self.finish
        if len(self.tokens) >= 2:
            self.started.set()


def stream_many(deployment, count: int) -> tuple[list[Reader], list[threading.Thread]]:
    body = {
        "model": "tiny-mtp",
        "prompt": "The licensor grants",
        "max_tokens": 900,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": True,
        "return_token_ids": True,
    }
    readers = [
        Reader(deployment.url + "/v1/completions", {**body, "seed": i}) for i in range(count)
    ]
    threads = [threading.Thread(target=reader.run) for reader in readers]
    for thread in threads:
        thread.start()
    for reader in readers:
        assert reader.started.wait(20)
    return readers, threads


@pytest.mark.parametrize("victim", ["gateway", "decode", "prefill"])
def test_kill_9_ends_every_stream_cleanly_and_the_next_request_is_served(start_deployment, victim):
    with start_deployment("-k", "1") as deployment:
        deployment.wait_lines(3)
        readers, threads = stream_many(deployment, 8)
        killed_at = time.monotonic()
        pid = deployment.kill(victim)
        for thread in threads:
            thread.join(timeout=40)
        for reader in readers:
            assert reader.error or reader.finish, "a stream ended without a word"
            if reader.error:
                assert reader.ended_at - killed_at < CALM_SECONDS
            if reader.finish:
                assert len(reader.tokens) == 900
        deployment.wait_restarted(victim, pid)
        reply = deployment.complete(prompt="next", max_tokens=5, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == 5
        for role in ("prefill", "decode"):
            deployment.wait_metric(role, "baton_engine_kv_blocks_used", 0)
            deployment.wait_metric(role, "baton_live_requests", 0)


def test_streams_that_decode_already_owns_survive_the_death_of_prefill(start_deployment):
    with start_deployment("-k", "1") as deployment:
        deployment.wait_lines(3)
        readers, threads = stream_many(deployment, 4)
        deployment.kill("prefill")
        for thread in threads:
            thread.join(timeout=40)
        assert [reader.finish for reader in readers] == ["length"] * 4
        assert [len(reader.tokens) for reader in readers] == [900] * 4
