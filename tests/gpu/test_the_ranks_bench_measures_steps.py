"""The benchmark of ranks runs where there is no GPU: the same engines, orders and records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

BENCH = Path(__file__).parent / "bench_ranks.py"


def test_each_number_of_ranks_is_measured_and_compared_with_one(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--device", "numpy", "--shape", "small", "--context", "128", "--steps", "3"]
    words += ["--batches", "1", "3", "--ranks", "1", "2", "--json", str(report)]
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, str(BENCH), *words],
        env=dict(os.environ) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(report.read_text())
    cases = {(case["ranks"], case["batch"]): case for case in told["cases"]}
    assert set(cases) == {(1, 1), (1, 3), (2, 1), (2, 3)}
    for case in cases.values():
        assert 0 < case["low_us"] <= case["us"] <= case["high_us"]
        assert case["pool_tokens"] >= 3 * 128, "every sequence has blocks of its own"
    for speedup in told["speedups"]:
        batch = speedup["batch"]
        assert speedup["speedup"] == cases[1, batch]["us"] / cases[2, batch]["us"]
    assert len(told["speedups"]) == 2
