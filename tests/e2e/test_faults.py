"""kill -9 of each process mid-stream: clean ends, nothing hangs, the next request is served."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest


@dataclass
class Reader:
    """One streaming client on a thread: what it got and how it ended."""

    url: str
    body: dict[str, Any]
    patience: float
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    finish: str = ""
    started: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=self.patience) as reply:
                for line in reply.iter_lines():
                    self.take(line)
        except httpx.HTTPError as error:
            self.error = type(error).__name__
        finally:
            self.started.set()

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


def stream_many(
    deployment, count: int, patience: float
) -> tuple[list[Reader], list[threading.Thread]]:
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
        Reader(deployment.url + "/v1/completions", {**body, "seed": i}, patience)
        for i in range(count)
    ]
    threads = [threading.Thread(target=reader.run) for reader in readers]
    for thread in threads:
        thread.start()
    for reader in readers:
        assert reader.started.wait(patience), f"no token within {patience} s"
    return readers, threads


def join(threads: list[threading.Thread], patience: float) -> None:
    for thread in threads:
        thread.join(patience)
        assert not thread.is_alive(), f"a stream goes on {patience} s after the death"


WAYS_TO_END = {
    "gateway": ("RemoteProtocolError", "ReadError"),
    "decode": ("worker decode-0 is gone: disconnected", "worker decode-0 is gone: silent"),
    "prefill": (),  # decode owns the streams by then
}


@pytest.mark.parametrize("victim", WAYS_TO_END)
def test_kill_9_ends_every_stream_cleanly_and_the_next_request_is_served(
    start_deployment, patience, victim
):
    with start_deployment("-k", "1") as deployment:
        deployment.wait_lines(3)
        readers, threads = stream_many(deployment, 8, patience)
        url, pid = deployment.url, deployment.kill(victim)
        join(threads, patience)
        for reader in readers:
            if reader.finish:
                assert (len(reader.tokens), reader.error) == (900, "")
            else:
                assert reader.error in WAYS_TO_END[victim], "a stream ended without a word"
        deployment.wait_restarted(victim, pid)
        assert deployment.url == url, "clients find it where it was"
        reply = deployment.complete(prompt="next", max_tokens=5, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == 5
        for role in ("prefill", "decode"):
            deployment.wait_metric(role, "baton_engine_kv_blocks_used", 0)
            deployment.wait_metric(role, "baton_live_requests", 0)
