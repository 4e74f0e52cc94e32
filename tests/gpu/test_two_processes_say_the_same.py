"""Another process says the bits that this one says, whatever each has captured and allocated."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton_testing.exactness import devices, properties
from baton_testing.exactness.said import digest

PROGRAM = """
import sys
from baton_testing.exactness import devices, properties
from baton_testing.exactness.asks import serve
from baton_testing.exactness.said import digest
with devices.subject(sys.argv[1]) as subject:
    with subject.engine(max_running=13, n_draft=2, overlap=True, prefill_tokens=77) as engine:
        print(digest(serve(engine, subject.asks())))
"""


@pytest.mark.parametrize("name", devices.parameters(devices.EXACT))
def test_another_process_says_the_same(name: str) -> None:
    """In batches of 13, with drafts, overlap and chunks there; one request at a time here."""
    with devices.subject(name) as subject:  # skips where there is no such device
        here = digest(properties.alone(subject))
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env=dict(os.environ) | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == here
