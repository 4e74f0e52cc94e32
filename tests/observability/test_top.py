"""`baton-worker top` on a real deployment that works."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e


def test_each_process_has_its_line(local: Any, table: list[str]) -> None:
    command = [sys.executable, "-m", "baton_worker.main", "top", "--once", "--interval", "2"]
    urls = list(local.metrics_urls.values())
    with subprocess.Popen([*command, *urls], stdout=subprocess.PIPE, text=True,
                          env={"COLUMNS": "180"}) as top:  # fmt: skip
        while top.poll() is None:
            body = {"model": "tiny-mtp", "prompt": "You may", "max_tokens": 16, "logprobs": 2}
            httpx.post(f"{local.url}/v1/completions", json=body, timeout=30).raise_for_status()
        assert top.stdout is not None
        text = top.stdout.read()
    assert top.returncode == 0
    rows = {row.split("│")[1].strip(): row.split("│") for row in text.splitlines() if "│" in row}
    assert list(rows) == ["gateway", "prefill", "decode"]
    for role in rows:
        assert float(rows[role][3].replace(",", "")) > 0
    assert rows["decode"][5].strip().endswith("%")
    table += ["", *text.splitlines()]
