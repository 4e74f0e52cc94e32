"""A deployment whose every address is [::1]: links, KV transfer, probes, the API and `top`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from baton_worker.addresses import has_ipv6

FAST = ("--engine", "sim", "--sim", "decode_step_seconds=0.002", "--sim", "seed=5")

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this kernel has no IPv6")


@pytest.mark.parametrize("flags", [(), ("--curve",)], ids=["plain", "curve"])
def test_a_pair_serves_and_hands_over_over_ipv6_alone(start_deployment, flags) -> None:
    with start_deployment("--host", "::1", *FAST, *flags) as deployment:
        deployment.wait_lines(3)
        assert deployment.url.startswith("http://[::1]:")
        reply = deployment.complete(prompt="The licensor", max_tokens=30, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == 30
        deployment.wait_at_least("decode", "baton_handoff_received_bytes_total", 1)
        for role in ("gateway", "prefill", "decode"):
            process = psutil.Process(deployment.latest(role)["pid"])
            found = {connection.laddr.ip for connection in process.net_connections("tcp")}
            assert found == {"::1"}, role
        shown = subprocess.run(
            [Path(sys.executable).parent / "baton-worker", "top", "--once", "--interval", "0.1"]
            + [deployment.latest(role)["metrics_url"] for role in ("gateway", "decode")],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "[::1]:" in shown.stdout
        assert "decode" in shown.stdout
