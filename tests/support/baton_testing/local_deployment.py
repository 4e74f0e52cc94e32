"""`baton-worker local` as a subprocess, started and ended by the tests that use it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton_testing.processes import HTTP, PATIENCE_SECONDS, metric, wait_until
from baton_testing.tiny_model import TINY_MODEL


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

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Where each process shows its metrics, by role."""
        return {line["role"]: line["metrics_url"] for line in self.lines}

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
        """Wait until every gateway that is ready has a pair."""
        self.wait_for_line(
            "a gateway is ready", lambda: any(line["role"] == "gateway" for line in self.lines)
        )

        def answer() -> str:
            ended = self.process.poll()
            assert ended is None, f"the deployment ended with {ended} before a pair was usable"
            gateways = [line for line in self.lines if line["role"] == "gateway"]
            metrics = [line["metrics_url"].removesuffix("/metrics") for line in gateways]
            try:
                texts = [HTTP.get(f"{url}/readyz").text for url in metrics]
            except httpx.HTTPError as error:
                return repr(error)
            late = [text for text in texts if '"status":"ready"' not in text]
            return late[0] if late else "usable"

        wait_until("a pair is usable", answer, lambda text: text == "usable")

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

    def metric(self, role: str, name: str, **labels: str) -> float:
        """Return the sum over all samples of a name with these labels."""
        return metric(self.latest(role)["metrics_url"], name, **labels)

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
        body = {"model": TINY_MODEL.name, **body}
        return HTTP.post(self.url + path, json=body)


SILENT_SECONDS = 20
"""For which a process must be silent to be given up: several times what one that others use the
processors of was silent for. One that dies is missed at once, by its connection.
"""


@contextlib.contextmanager
def start(*flags: str) -> Iterator[Deployment]:
    """Start a deployment, wait until it serves, end it and check that it ended."""
    command = [sys.executable, "-m", "baton_worker.main", "--log-level", "warning", "local"]
    command += ["--model", str(TINY_MODEL), "--port", "0", "--json"]
    command += ["--dead-after", str(SILENT_SECONDS), *flags]
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
