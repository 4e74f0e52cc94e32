"""Real deployments on loopback, started and ended by the tests that use them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-mtp"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.e2e)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Deployment:
    """`baton-worker local` as a subprocess, with the readiness lines it printed."""

    process: subprocess.Popen[str]
    port: int
    lines: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(json.loads(line))
                self.changed.notify_all()

    def latest(self, role: str) -> dict[str, Any]:
        """Return the newest process of a role."""
        return [line for line in self.lines if line["role"] == role][-1]

    def wait_lines(self, count: int, seconds: float = 60.0) -> None:
        with self.changed:
            ok = self.changed.wait_for(lambda: len(self.lines) >= count, seconds)
        assert ok, f"only {len(self.lines)} of {count} processes became ready: {self.lines}"

    def wait_usable(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"no usable pair after {seconds} s")

    def wait_restarted(self, role: str, dead_pid: int, seconds: float = 30.0) -> None:
        with self.changed:
            ok = self.changed.wait_for(lambda: self.latest(role)["pid"] != dead_pid, seconds)
        assert ok, f"{role} was not restarted"
        self.wait_usable(seconds)

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the newest process of a role; return its pid."""
        pid = int(self.latest(role)["pid"])
        os.kill(pid, number)
        return pid

    def metrics(self, role: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = httpx.get(self.latest(role)["metrics_url"], timeout=5).text
        return {
            (s.name, frozenset(s.labels.items())): s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
        }

    def metric(self, role: str, name: str, **labels: str) -> float:
        """Return the sum over all samples of a name with these labels."""
        wanted = set(labels.items())
        found = [v for (n, ls), v in self.metrics(role).items() if n == name and wanted <= ls]
        return sum(found)

    def wait_metric(self, role: str, name: str, want: float, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while (value := self.metric(role, name)) != want:
            assert time.monotonic() < deadline, f"{role} {name} is {value}, wanted {want}"
            time.sleep(0.05)

    def complete(self, **body: Any) -> dict[str, Any]:
        """Post a completion that must succeed."""
        reply = self.post("/v1/completions", **body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def post(self, path: str, **body: Any) -> httpx.Response:
        body = {"model": MODEL.name, **body}
        return httpx.post(self.url + path, json=body, timeout=60)


@contextlib.contextmanager
def start(*flags: str) -> Iterator[Deployment]:
    """Start a deployment, wait until it serves, end it and check that it ended."""
    port = free_port()
    command = [sys.executable, "-m", "baton_worker.main", "--log-level", "warning", "local"]
    command += ["--model", str(MODEL), "--port", str(port), "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deployment = Deployment(process, port)
    reader = threading.Thread(target=deployment.read)
    reader.start()
    try:
        deployment.wait_usable()
        yield deployment
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=15)
        finally:
            process.kill()
            reader.join(timeout=5)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="session")
def start_deployment() -> Callable[..., contextlib.AbstractContextManager[Deployment]]:
    return start


@pytest.fixture(scope="module")
def pair() -> Iterator[Deployment]:
    """One prefill and one decode process, two drafts a step."""
    with start("-k", "2") as deployment:
        deployment.wait_lines(3)
        yield deployment


@pytest.fixture(scope="module")
def mixed() -> Iterator[Deployment]:
    """One mixed process without speculation: the plainest path there is."""
    with start("--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0") as deployment:
        deployment.wait_lines(2)
        yield deployment


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return MODEL
