"""Starting and ending a deployment: readiness lines, SIGTERM within ten seconds, no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


def wait_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive(pids):
        assert time.monotonic() < deadline, f"still alive: {alive(pids)}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_process_within_ten_seconds(start_deployment, number):
    with start_deployment() as deployment:
        deployment.wait_lines(3)
        pids = [line["pid"] for line in deployment.lines]
        assert sorted(line["role"] for line in deployment.lines) == ["decode", "gateway", "prefill"]
        started = time.monotonic()
        deployment.process.send_signal(number)
        assert deployment.process.wait(timeout=12) == 0
        assert time.monotonic() - started < 10
        assert alive(pids) == []


def test_a_killed_supervisor_leaves_no_orphan(start_deployment):
    with start_deployment() as deployment:
        deployment.wait_lines(3)
        pids = [line["pid"] for line in deployment.lines]
        os.kill(deployment.process.pid, signal.SIGKILL)
        deployment.process.wait(timeout=5)
        wait_gone(pids, 10)


def test_each_process_serves_its_metrics_and_health(pair):
    for role in ("gateway", "prefill", "decode"):
        base = pair.latest(role)["metrics_url"].removesuffix("/metrics")
        assert httpx.get(f"{base}/healthz", timeout=5).status_code == 200
        assert httpx.get(f"{base}/readyz", timeout=5).status_code == 200
        text = httpx.get(f"{base}/metrics", timeout=5).text
        assert 'model="tiny-mtp"' in text


def test_a_drained_worker_finishes_what_it_has_and_takes_nothing_new(start_deployment):
    with start_deployment("--decode", "0", "--prefill", "0", "--mixed", "1") as deployment:
        deployment.wait_lines(2)
        base = deployment.latest("mixed")["metrics_url"].removesuffix("/metrics")
        with httpx.stream(
            "POST",
            deployment.url + "/v1/completions",
            json={"model": "tiny-mtp", "prompt": "a", "max_tokens": 300, "ignore_eos": True,
                  "stream": True},
            timeout=60,
        ) as reply:  # fmt: skip
            lines = reply.iter_lines()
            next(lines)
            drain = httpx.post(f"{base}/drain", timeout=5).json()
            assert drain["remaining"] >= 1
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in rest)
        deadline = time.monotonic() + 5
        while httpx.get(f"{base}/drain", timeout=5).json() != {"draining": True, "remaining": 0}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = deployment.post("/v1/completions", prompt="b", max_tokens=1)
        assert refused.status_code == 503


def test_a_wrong_model_folder_ends_the_deployment_with_its_name(tmp_path):
    command = [sys.executable, "-m", "baton_worker.main", "local", "--model", str(tmp_path)]
    done = subprocess.run(
        [*command, "--port", "0"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "config.json" in done.stderr or "tokenizer.json" in done.stderr
