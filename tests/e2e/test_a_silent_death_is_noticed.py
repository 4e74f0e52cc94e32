"""kill -9 of prefill in a prompt: known at once, decode is cancelled, the client answered.

Nobody restarts a process here, and every time limit that could end the request is minutes: what
ends it is the news that prefill's connection is gone.
"""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_testing.processes import stand_still
from baton_testing.unsupervised import unsupervised
from baton_worker.config import EngineConfig, SimConfig

PATIENCE_SECONDS = 600.0
ASK: dict[str, Any] = {
    "model": "tiny-mtp",
    "prompt": "The licensor grants",
    "max_tokens": 20,
    "ignore_eos": True,
    "temperature": 0.0,
    "return_token_ids": True,
}


def sim(prefill_token_seconds: float) -> EngineConfig:
    pace = SimConfig(prefill_token_seconds=prefill_token_seconds, decode_step_seconds=0.002)
    return EngineConfig(device="sim", sim=pace)


class Client(threading.Thread):
    """One streaming request: its tokens, and the error that ended it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.tokens: list[int] = []
        self.error: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        url, body = f"{self.url}/v1/completions", ASK | {"stream": True}
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_SECONDS) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {") or (line.startswith("{") and "error" in line):
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.tokens += choice["token_ids"]


@pytest.mark.parametrize("has_curve", [False, True], ids=["plain", "curve"])
def test_prefill_killed_in_a_prompt_ends_the_request_and_cancels_decode(
    tmp_path: Path, has_curve: bool
) -> None:
    with unsupervised(tmp_path, has_curve=has_curve, engine=sim(60.0)) as processes:
        gateway, decode = processes["gateway"], processes["decode-0"]
        client = Client(processes.url)
        processes["prefill-0"].wait_metric("baton_link_commands_total", 1)
        decode.wait_metric("baton_reserved_requests", 1)
        processes.kill("prefill-0")
        client.join(PATIENCE_SECONDS)
        assert client.error["code"] == "worker_lost"
        assert client.error["message"] == "worker prefill-0 is gone: disconnected"
        decode.wait_metric("baton_reserved_requests", 0)
        decode.wait_metric("baton_live_requests", 0)
        assert decode.metric("baton_link_commands_total") == 2, "RESERVE, and ABORT behind it"
        assert gateway.metric("baton_link_disconnects_total") == 1
        assert gateway.metric("baton_link_workers_down_total", reason="disconnected") == 1
        assert gateway.metric("baton_link_workers_down_total") == 1
        assert gateway.metric("baton_link_heartbeat_timeouts_total") == 0


def test_prefill_killed_in_a_prompt_is_replaced_by_another(tmp_path: Path) -> None:
    with unsupervised(tmp_path, prefill=2, engine=sim(20e-6)) as processes:
        wanted = httpx.post(
            f"{processes.url}/v1/completions", json=ASK, timeout=PATIENCE_SECONDS
        ).json()
        for name in ("prefill-0", "prefill-1"):
            stand_still(processes[name].popen.pid)
        clients = [Client(processes.url) for _ in range(2)]
        processes["decode-0"].wait_metric("baton_reserved_requests", 2)
        processes.kill("prefill-0")
        processes["prefill-1"].signal(signal.SIGCONT)
        for client in clients:
            client.join(PATIENCE_SECONDS)
            assert client.error == {}
            assert client.tokens == wanted["choices"][0]["token_ids"]
        gateway = processes["gateway"]
        assert gateway.metric("baton_gateway_retries_total", how="from_start") == 1
        assert gateway.metric("baton_link_workers_down_total", reason="disconnected") == 1
        processes["decode-0"].wait_metric("baton_live_requests", 0)
