"""`baton-worker top` on a real deployment that works."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e


def watched(local: Any, patience: float, seconds: int) -> str:
    """Return what `top` shows of some seconds in which requests are served."""
    command = [sys.executable, "-m", "baton_worker.main", "top", "--once"]
    command += ["--interval", str(seconds)]
    urls = list(local.metrics_urls.values())
    with subprocess.Popen([*command, *urls], stdout=subprocess.PIPE, text=True,
                          env={"COLUMNS": "180"}) as top:  # fmt: skip
        while top.poll() is None:
            body = {"model": "tiny-mtp", "prompt": "You may", "max_tokens": 16, "logprobs": 2}
            where = f"{local.url}/v1/completions"
            httpx.post(where, json=body, timeout=patience).raise_for_status()
        assert top.stdout is not None
        text = top.stdout.read()
    assert top.returncode == 0
    return text


def lines_of(text: str) -> dict[str, list[str]]:
    cells = [line.split("│") for line in text.splitlines() if "│" in line]
    return {line[1].strip(): line for line in cells}


def tokens_per_second(line: list[str]) -> float:
    return float(line[3].replace(",", ""))


def test_each_process_has_its_line(local: Any, table: list[str], patience: float) -> None:
    deadline = time.monotonic() + patience
    for n_tries in itertools.count():
        text = watched(local, patience, 2**n_tries)
        rows = lines_of(text)
        assert list(rows) == ["gateway", "prefill", "decode"]
        # A request may take longer than what was looked at: that is twice as long each time.
        if all(tokens_per_second(line) > 0 for line in rows.values()):
            break
        assert time.monotonic() < deadline, f"a process never had tokens:\n{text}"
    assert rows["decode"][5].strip().endswith("%")
    table += ["", *text.splitlines()]
