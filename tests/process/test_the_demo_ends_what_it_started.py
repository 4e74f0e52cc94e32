"""`make demo KEEP=1` that is told to stop leaves no deployment behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, str(ROOT / "examples" / "demo.py"), "--keep"]


@pytest.mark.timeout(90)
def test_sigterm_ends_the_deployment_with_the_demo() -> None:
    path = os.pathsep.join(part for part in sys.path if part)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [*DEMO, "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ) | {"PYTHONPATH": path}
    ) as demo:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        assert any("serving until" in line for line in lines)
        demo.send_signal(signal.SIGTERM)
        "".join(lines)
        assert demo.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass
