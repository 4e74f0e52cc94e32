"""While weights are read a worker answers probes, says how far it is, and ends when it is told to.

The loading stands still at a tensor until the test opens the gate, so nothing here is a race.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_testing.processes import HTTP, PATIENCE_SECONDS, metric, wait_until
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    ControlConfig,
    CurveConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
    dump_config,
)
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.naming import EMBED, FINAL_NORM, main_layer

GATED = """
import sys
from baton_worker.engine.model.checkpoint import StoredTensor
from baton_worker.main import main

write_to, (gate, key, config) = StoredTensor.write_to, sys.argv[1:]

def gated(self, out, rows):
    if self.key == key:
        open(gate).read()
    write_to(self, out, rows)

StoredTensor.write_to = gated
sys.exit(main(["mixed", "--config", config]))
"""
AT = main_layer(0).input_norm
READ_BEFORE = (EMBED, FINAL_NORM)
"""What the loader of the host is done with when it comes to the gate."""


@dataclass
class Worker:
    popen: subprocess.Popen[str]
    url: str
    folder: Path

    @property
    def control(self) -> Path:
        return self.folder / "control"

    def order(self, method: str, path: str, **request: Any) -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.control))) as client:
            return client.request(method, f"http://localhost{path}", **request)

    def readiness(self) -> dict[str, Any]:
        reply = HTTP.get(f"{self.url}/readyz")
        assert reply.status_code == 503
        said: dict[str, Any] = reply.json()
        return said

    def open_gate(self) -> None:
        with (self.folder / "gate").open("w"):
            pass

    def end(self) -> str:
        """Return the log of a process that was told to end, behind what was read of it."""
        self.popen.send_signal(signal.SIGTERM)
        _, log = self.popen.communicate(timeout=PATIENCE_SECONDS)
        return log


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Worker]:
    """A worker that has come to the gate; nobody gives it work."""
    os.mkfifo(folder / "gate")
    config = ProcessConfig(
        model=ModelConfig(str(TINY_MODEL)),
        link=LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        health=HttpConfig("127.0.0.1", 0),
        control=ControlConfig(str(folder / "control")),
    )
    path = folder / "worker.yaml"
    path.write_bytes(dump_config(config))
    command = [sys.executable, "-c", GATED, str(folder / "gate"), AT, str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stderr is not None
            said = iter(popen.stderr.readline, "")
            url = next(found[1] for line in said if (found := re.search(r"probes url=(\S+)", line)))
            worker = Worker(popen, url, folder)
            wanted = sum(open_checkpoint(TINY_MODEL)[key].raw.nbytes for key in READ_BEFORE)
            wait_until(
                "the loader stands at the gate",
                lambda: metric(f"{url}/metrics", "baton_weights_read_bytes"),
                lambda n_read: n_read == wanted,
            )
            yield worker
        finally:
            popen.kill()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with started(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_probes_and_metrics_tell_how_far_it_is(worker: Worker) -> None:
    total = sum(stored.raw.nbytes for stored in open_checkpoint(TINY_MODEL).values())
    metrics = f"{worker.url}/metrics"
    assert metric(metrics, "baton_weights_bytes") == total
    share = int(100 * metric(metrics, "baton_weights_read_bytes") // total)
    assert HTTP.get(f"{worker.url}/healthz").json()["alive"] is True
    said = worker.readiness()
    assert said["ready"] is False
    assert re.fullmatch(
        rf"loading weights: 0\.0 of 0\.0 GB \({share} %\), \d+\.\d GB/s", said["message"]
    )
    assert HTTP.get(f"{worker.url}/speculative").json() == {"error": said["message"]}
    worker.open_gate()
    wait_until("the engine is there", worker.readiness, lambda now: now["message"] == "")
    assert metric(metrics, "baton_weights_read_bytes") == total
    seconds = metric(metrics, "baton_weights_load_seconds")
    assert seconds > 0
    assert seconds == metric(metrics, "baton_weights_load_seconds"), "it stands"
    assert "baton_engine_kv_blocks{" in HTTP.get(metrics).text, "what an engine counts is there"
    log = worker.end()
    assert worker.popen.returncode == 0
    assert "weights are loaded" in log


@pytest.mark.slow
def test_a_drain_that_is_asked_for_meanwhile_waits_for_nothing_and_is_kept(worker: Worker) -> None:
    refused = worker.order("POST", "/speculative", json={"num_speculative_tokens": 1})
    assert (refused.status_code, "loading weights" in refused.json()["error"]) == (503, True)
    asked = worker.order("POST", "/drain")
    assert (asked.status_code, asked.json()) == (202, {"draining": True, "remaining": 0})
    assert HTTP.get(f"{worker.url}/drain").json() == {"draining": True, "remaining": 0}
    worker.open_gate()
    wait_until("the engine is there", worker.readiness, lambda now: now["message"] == "")
    wait_until("it drains", worker.readiness, lambda now: now["draining"] is True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_in_good_order(worker: Worker, number: int) -> None:
    """Without a handler a container's first process would go on; Paddle leaves none."""
    assert worker.control.exists()
    worker.popen.send_signal(number)
    _, log = worker.popen.communicate(timeout=PATIENCE_SECONDS)
    assert worker.popen.returncode == 0, log
    assert "ending before the engine was there" in log
    assert f"signal={signal.Signals(number).name}" in log
    assert not worker.control.exists()
