"""Fuzzing both engines finds nothing but RecordError, in time and without amplification."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_records.py")
SECONDS = float(os.environ.get("BATON_FUZZ_SECONDS", "60"))
ENGINES = {"atheris": SECONDS, "mutations": SECONDS / 3}
MIN_INPUTS = 10_000
"""Parsed however long that takes: a busy machine parses a twentieth of what a free one does."""
MIN_REASONS = 25


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.timeout(960)
@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_declared_error_escapes_the_record_parsers(engine: str) -> None:
    if engine == "atheris" and importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: the mutation engine runs alone")
    command = [sys.executable, str(SCRIPT), "--engine", engine]
    command += ["--seconds", str(ENGINES[engine]), "--inputs", str(MIN_INPUTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["inputs"] >= MIN_INPUTS
    assert tally["accepted"] >= MIN_INPUTS // 100
    assert tally["memory_samples"] >= MIN_INPUTS // 100
    assert len(tally["refused"]) >= MIN_REASONS
