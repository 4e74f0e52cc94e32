"""kill -9 of prefill in a prompt: known at once, decode is cancelled, the client answered.

Nobody restarts a process here, and every time limit that could end the request is ten minutes: what
ends it is the news that prefill's connection is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_worker.config import EngineConfig, ProcessConfig, SimConfig, dump_config
from baton_worker.link.curve import generate_key_files
from baton_worker.local.layout import CurveFiles, LocalOptions, plan_processes, process_names
from baton_worker.readiness import Ready

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-mtp"
FOREVER = 600.0
ASK: dict[str, Any] = {
    "model": MODEL.name,
    "prompt": "The licensor grants",
    "max_tokens": 20,
    "ignore_eos": True,
    "temperature": 0.0,
    "return_token_ids": True,
}


@dataclass
class Process:
    """One process and where it is."""

    popen: subprocess.Popen[bytes]
    ready: Ready

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over all samples of a name with these labels."""
        text = httpx.get(self.ready.metrics_url, timeout=10).text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        wanted = labels.items()
        return sum(s.value for s in samples if s.name == name and wanted <= s.labels.items())

    def wait_metric(self, name: str, want: float, seconds: float = 30.0, **labels: str) -> None:
        deadline = time.monotonic() + seconds
        while (value := self.metric(name, **labels)) != want:
            assert time.monotonic() < deadline, f"{name} is {value}, wanted {want}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)


class Unsupervised(dict[str, Process]):
    """The running processes by name."""

    @property
    def url(self) -> str:
        return self["gateway"].ready.url

    def kill(self, name: str) -> None:
        """kill -9, and wait until the process is gone."""
        self[name].signal(signal.SIGKILL)
        self[name].popen.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _keys(options: LocalOptions, folder: Path) -> dict[str, CurveFiles]:
    names = [name for name, _ in process_names(options)]
    pairs = [generate_key_files(folder / f"{n}.pub", folder / f"{n}.sec") for n in names]
    allowed = folder / "allowed"
    allowed.write_text("".join(pair.public.decode() + "\n" for pair in pairs))
    shared = (str(folder / "gateway.pub"), str(allowed))
    return {
        n: CurveFiles(str(folder / f"{n}.pub"), str(folder / f"{n}.sec"), *shared) for n in names
    }


def _start(
    name: str, role: str, config: ProcessConfig, folder: Path, stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process; return it and the pipe on which it says that it is ready."""
    path = folder / f"{name}.yaml"
    path.write_bytes(dump_config(config))
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "baton_worker.main", "--log-level", "warning", role]
    command += ["--config", str(path), "--with-parent", "--ready-fd", str(write_fd)]
    popen = subprocess.Popen(command, pass_fds=[write_fd], stdin=subprocess.DEVNULL)
    os.close(write_fd)
    stack.callback(popen.wait)
    stack.callback(popen.kill)
    return popen, read_fd


def _patient(config: ProcessConfig) -> ProcessConfig:
    """Nothing but the end of a connection may tell of a dead process."""
    return msgspec.structs.replace(
        config,
        link=msgspec.structs.replace(config.link, dead_after_seconds=FOREVER),
        handoff=msgspec.structs.replace(config.handoff, deadline_seconds=FOREVER),
    )


@contextlib.contextmanager
def unsupervised(folder: Path, **changes: Any) -> Iterator[Unsupervised]:
    """Start the processes, wait until the gateway has all workers, and kill them in the end."""
    options = LocalOptions(str(MODEL), served_name=MODEL.name, port=_free_port())
    options = dataclasses.replace(options, **changes)
    curve = _keys(options, folder) if options.has_curve else {}
    plans = plan_processes(options, _free_port(), curve)
    running = Unsupervised()
    with contextlib.ExitStack() as stack:
        started = [_start(p.name, p.role, _patient(p.config), folder, stack) for p in plans]
        for plan, (popen, read_fd) in zip(plans, started, strict=True):
            with os.fdopen(read_fd, "rb") as pipe:
                running[plan.name] = Process(
                    popen, msgspec.json.decode(pipe.readline(), type=Ready)
                )
        running["gateway"].wait_metric("baton_link_workers_up", len(plans) - 1)
        yield running


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
        with httpx.stream("POST", url, json=body, timeout=50) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {") or (line.startswith("{") and "error" in line):
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.tokens += choice["token_ids"]


@pytest.mark.timeout(120)
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
        client.join(40)
        assert client.error["code"] == "worker_lost"
        assert client.error["message"] == "worker prefill-0 is gone: disconnected"
        decode.wait_metric("baton_reserved_requests", 0)
        decode.wait_metric("baton_live_requests", 0)
        assert decode.metric("baton_link_commands_total") == 2, "RESERVE, and ABORT behind it"
        assert gateway.metric("baton_link_disconnects_total") == 1
        assert gateway.metric("baton_link_workers_down_total", reason="disconnected") == 1
        assert gateway.metric("baton_link_workers_down_total") == 1
        assert gateway.metric("baton_link_heartbeat_timeouts_total") == 0


@pytest.mark.timeout(120)
def test_prefill_killed_in_a_prompt_is_replaced_by_another(tmp_path: Path) -> None:
    with unsupervised(tmp_path, prefill=2, engine=sim(20e-6)) as processes:
        wanted = httpx.post(f"{processes.url}/v1/completions", json=ASK, timeout=50).json()
        for name in ("prefill-0", "prefill-1"):
            processes[name].signal(signal.SIGSTOP)
        clients = [Client(processes.url) for _ in range(2)]
        processes["decode-0"].wait_metric("baton_reserved_requests", 2)
        processes.kill("prefill-0")
        processes["prefill-1"].signal(signal.SIGCONT)
        for client in clients:
            client.join(40)
            assert client.error == {}
            assert client.tokens == wanted["choices"][0]["token_ids"]
        gateway = processes["gateway"]
        assert gateway.metric("baton_gateway_retries_total", how="from_start") == 1
        assert gateway.metric("baton_link_workers_down_total", reason="disconnected") == 1
        processes["decode-0"].wait_metric("baton_live_requests", 0)
