"""Starting and ending a deployment: readiness lines, SIGTERM ends all, no orphan."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

import baton_worker.main
from baton_testing.processes import wait_until


def is_alive(process: psutil.Process) -> bool:
    """Say whether it still runs; one that only waits for its parent to ask has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_process(start_deployment, patience, number):
    with start_deployment() as deployment:
        deployment.wait_lines(3)
        processes = [psutil.Process(line["pid"]) for line in deployment.lines]
        assert sorted(line["role"] for line in deployment.lines) == ["decode", "gateway", "prefill"]
        deployment.process.send_signal(number)
        assert deployment.process.wait(timeout=patience) == 0
        assert alive(processes) == []


def test_a_killed_supervisor_leaves_no_orphan(start_deployment, patience):
    with start_deployment() as deployment:
        deployment.wait_lines(3)
        processes = [psutil.Process(line["pid"]) for line in deployment.lines]
        os.kill(deployment.process.pid, signal.SIGKILL)
        deployment.process.wait(timeout=patience)
        wait_until("every process is gone", lambda: alive(processes), lambda left: not left)


def test_each_process_serves_its_metrics_and_health(pair, patience):
    for role in ("gateway", "prefill", "decode"):
        base = pair.latest(role)["metrics_url"].removesuffix("/metrics")
        assert httpx.get(f"{base}/healthz", timeout=patience).status_code == 200
        assert httpx.get(f"{base}/readyz", timeout=patience).status_code == 200
        text = httpx.get(f"{base}/metrics", timeout=patience).text
        assert 'model="tiny-mtp"' in text


def test_nobody_else_writes_where_readiness_is_read(pair):
    """Paddle writes to standard output when SIGTERM finds it still loading, for one."""
    of_deployment, *of_processes = (
        Path(f"/proc/{pid}/fd/1").readlink()
        for pid in (pair.process.pid, *(line["pid"] for line in pair.lines))
    )
    assert of_deployment not in of_processes


def control(ready, *order):
    """Give an order as a person does, and return what the worker says."""
    command = [sys.executable, "-m", "baton_worker.main", "control", ready["control"], *order]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def control_at_once(ready, *order):
    """Do as `control` without its process, which a busy machine may take a minute to start."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert baton_worker.main.main(["control", ready["control"], *order]) == 0
    return json.loads(said.getvalue())


def test_a_drained_worker_finishes_what_it_has_takes_nothing_new_and_comes_back(
    start_deployment, patience
):
    # A token each 20 ms, for 18 s: the stream is still under way when the worker is told to drain.
    slow = ("--engine", "sim", "--sim", "decode_step_seconds=0.02", "-k", "0")
    mixed = ("--decode", "0", "--prefill", "0", "--mixed", "1")
    with start_deployment(*mixed, *slow) as deployment:
        deployment.wait_lines(2)
        base = deployment.latest("mixed")["metrics_url"].removesuffix("/metrics")
        with httpx.stream(
            "POST",
            deployment.url + "/v1/completions",
            json={"model": "tiny-mtp", "prompt": "a", "max_tokens": 900, "ignore_eos": True,
                  "stream": True},
            timeout=patience,
        ) as reply:  # fmt: skip
            lines = reply.iter_lines()
            next(lines)
            assert httpx.post(f"{base}/drain", timeout=patience).status_code == 405
            assert not httpx.get(f"{base}/drain", timeout=patience).json()["draining"]
            drain = control_at_once(deployment.latest("mixed"), "drain")
            assert drain["remaining"] >= 1
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in rest)
        wait_until(
            "nothing needs the worker",
            lambda: httpx.get(f"{base}/drain", timeout=patience).json(),
            lambda said: said == {"draining": True, "remaining": 0},
        )
        refused = deployment.post("/v1/completions", prompt="b", max_tokens=1)
        assert refused.status_code == 503
        assert httpx.get(f"{base}/readyz", timeout=patience).status_code == 503
        control(deployment.latest("mixed"), "undrain")
        deployment.wait_usable()
        assert deployment.complete(prompt="b", max_tokens=1)["choices"]
        assert httpx.get(f"{base}/readyz", timeout=patience).status_code == 200


def test_a_wrong_model_folder_ends_the_deployment_with_its_name(tmp_path, patience):
    command = [sys.executable, "-m", "baton_worker.main", "local", "--model", str(tmp_path)]
    done = subprocess.run(
        [*command, "--port", "0"], capture_output=True, text=True, timeout=patience, check=False
    )
    assert done.returncode != 0
    assert "config.json" in done.stderr or "tokenizer.json" in done.stderr
