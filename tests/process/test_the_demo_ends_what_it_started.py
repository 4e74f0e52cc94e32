"""`make demo KEEP=1` that is told to stop leaves no deployment behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_worker.ports import port_of, reserve_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, str(ROOT / "examples" / "demo.py"), "--keep"]


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port("127.0.0.1") as keeper:
        yield port_of(keeper)


def test_sigterm_ends_the_deployment_with_the_demo(port: int) -> None:
    path = os.pathsep.join(part for part in sys.path if part)
    command = [*DEMO, "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ) | {"PYTHONPATH": path}
    ) as demo:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        assert any("serving until" in line for line in lines)
        demo.send_signal(signal.SIGTERM)
        "".join(lines)
        assert demo.wait() == 128 + signal.SIGTERM
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass
