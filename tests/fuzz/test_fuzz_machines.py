"""Whatever a peer says, what a state machine then has to say can be encoded."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_fuzz.machines import MACHINES

SCRIPT = Path(__file__).with_name("fuzz_machines.py")
NAMES = ("gateway", "worker", "kv")
SECONDS = float(os.environ.get("BATON_FUZZ_SECONDS", "60"))
ENGINES = {"atheris": SECONDS, "random": SECONDS / 3}
MIN_WORDS = 50_000
"""Taken however long that takes: a busy machine takes a twentieth of what a free one does."""
MIN_EVENTS = 400
MIN_REASONS = {"gateway": 5, "worker": 5, "kv": 3}


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.fast_cases(1)
@pytest.mark.hypothesis
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", NAMES)
def test_no_conversation_leaves_a_state_that_cannot_be_said(name: str) -> None:
    machine = MACHINES[name]()

    @settings(max_examples=100, deadline=None)
    @given(st.integers(0, (1 << 64) - 1))
    def hold(seed: int) -> None:
        machine.check(random.Random(seed).randbytes(600))

    hold()
    assert machine.tally.words > 300
    assert machine.tally.events > 0


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.timeout(960)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_only_the_declared_error_escapes_the_state_machines(name: str, engine: str) -> None:
    if engine == "atheris" and importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: the random engine runs alone")
    command = [sys.executable, str(SCRIPT), name, "--engine", engine]
    command += ["--seconds", str(ENGINES[engine]), "--inputs", str(MIN_WORDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["words"] >= MIN_WORDS
    assert tally["events"] >= MIN_EVENTS
    assert len(tally["refused"]) >= MIN_REASONS[name]
