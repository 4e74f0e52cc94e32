"""Real deployments on loopback, started and ended by the tests that use them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-mtp"
PATIENCE_SECONDS = 120.0
"""How long a condition may take on a busy machine; what never comes true is told by name then."""
HTTP = httpx.Client(
    timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
)
"""One for all: to make a client costs more than to ask, above all where a test asks again and
again. It keeps no connection, for the processes are killed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.e2e)


T = TypeVar("T")


def wait_until(wanted: str, look: Callable[[], T], claim: Callable[[T], bool]) -> T:
    """Look until what is seen satisfies the claim, and return it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not claim(seen := look()):
        assert time.monotonic() < deadline, f"{wanted}: not so after {PATIENCE_SECONDS} s: {seen}"
        time.sleep(0.02)
    return seen


@dataclass
class Deployment:
    """`baton-worker local` as a subprocess, with the readiness lines it printed."""

    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    has_ended: bool = False

    @property
    def url(self) -> str:
        return str(self.latest("gateway")["url"])

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(json.loads(line))
                self.changed.notify_all()
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()

    def latest(self, role: str) -> dict[str, Any]:
        """Return the newest process of a role."""
        return [line for line in self.lines if line["role"] == role][-1]

    def wait_for_line(self, wanted: str, claim: Callable[[], bool]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: claim() or self.has_ended, PATIENCE_SECONDS)
            ended = "the deployment ended" if self.has_ended else f"after {PATIENCE_SECONDS} s"
            assert claim(), f"{wanted}: not so, {ended}; ready are {self.lines}"

    def wait_lines(self, count: int) -> None:
        self.wait_for_line(f"{count} processes are ready", lambda: len(self.lines) >= count)

    def wait_usable(self) -> None:
        self.wait_for_line(
            "a gateway is ready", lambda: any(line["role"] == "gateway" for line in self.lines)
        )

        def answer() -> str:
            try:
                return HTTP.get(f"{self.url}/readyz").text
            except httpx.HTTPError as error:
                return repr(error)

        wait_until("a pair is usable", answer, lambda text: '"status":"ready"' in text)

    def wait_restarted(self, role: str, dead_pid: int) -> None:
        self.wait_for_line(
            f"{role} is restarted", lambda: bool(self.latest(role)["pid"] != dead_pid)
        )
        self.wait_usable()

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the newest process of a role; return its pid."""
        pid = int(self.latest(role)["pid"])
        os.kill(pid, number)
        return pid

    def metrics(self, role: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = HTTP.get(self.latest(role)["metrics_url"]).text
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

    def wait_metric(self, role: str, name: str, want: float, **labels: str) -> None:
        """Wait until a metric is so: a worker counts behind what it has already sent."""
        where = f"{role} {name} {labels or ''} is {want:g}"
        wait_until(where, lambda: self.metric(role, name, **labels), lambda value: value == want)

    def wait_at_least(self, role: str, name: str, least: float, **labels: str) -> None:
        where = f"{role} {name} {labels or ''} is {least:g} or more"
        wait_until(where, lambda: self.metric(role, name, **labels), lambda value: value >= least)

    def wait_idle(self, *roles: str) -> None:
        """Wait until the last answers are counted whole: a worker does it behind sending them."""
        for role in roles:
            self.wait_metric(role, "baton_live_requests", 0)

    def complete(self, **body: Any) -> dict[str, Any]:
        """Post a completion that must succeed."""
        reply = self.post("/v1/completions", **body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def post(self, path: str, **body: Any) -> httpx.Response:
        body = {"model": MODEL.name, **body}
        return HTTP.post(self.url + path, json=body)


@contextlib.contextmanager
def start(*flags: str) -> Iterator[Deployment]:
    """Start a deployment, wait until it serves, end it and check that it ended."""
    command = [sys.executable, "-m", "baton_worker.main", "--log-level", "warning", "local"]
    command += ["--model", str(MODEL), "--port", "0", "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deployment = Deployment(process)
    reader = threading.Thread(target=deployment.read)
    reader.start()
    try:
        deployment.wait_usable()
        yield deployment
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
            reader.join(timeout=PATIENCE_SECONDS)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="session")
def start_deployment() -> Callable[..., contextlib.AbstractContextManager[Deployment]]:
    return start


@pytest.fixture(scope="session")
def patience() -> float:
    """Seconds that a condition may take."""
    return PATIENCE_SECONDS


@pytest.fixture(scope="session", name="wait_until")
def wait_until_fixture() -> Callable[..., Any]:
    """`wait_until(wanted, look, claim)`."""
    return wait_until


@pytest.fixture(scope="session")
def pair() -> Iterator[Deployment]:
    """One prefill and one decode process, two drafts a step; every test leaves it so."""
    with start("-k", "2") as deployment:
        deployment.wait_lines(3)
        yield deployment


@pytest.fixture(scope="session")
def mixed() -> Iterator[Deployment]:
    """One mixed process without speculation: the plainest path there is."""
    with start("--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0") as deployment:
        deployment.wait_lines(2)
        yield deployment


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return MODEL
