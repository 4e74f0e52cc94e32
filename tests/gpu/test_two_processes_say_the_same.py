"""Another process says the bits that this one says, whatever each has captured and allocated: on
this GPU, and on another one of its kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from baton_testing.exactness import devices, properties
from baton_testing.exactness.said import digest
from baton_testing.gpus import gpu_name, other_gpu

PROGRAM = """
import sys
from baton_testing.exactness import devices, properties
from baton_testing.exactness.asks import serve
from baton_testing.exactness.said import digest
from baton_testing.gpus import gpu_name
with devices.subject(sys.argv[1]) as subject:
    with subject.engine(max_running=13, n_draft=2, overlap=True, prefill_tokens=77) as engine:
        print(gpu_name() if subject.name.startswith("gpu-") else "none")
        print(digest(serve(engine, subject.asks())))
"""
ON_A_GPU = [
    name
    for name in devices.EXACT
    if devices.KNOWN[name].device == "gpu" and devices.KNOWN[name].ranks == 1
]


def told_by_another_process(name: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the other process's GPU, and its digest: of batches of 13, with drafts, overlap and
    chunks.
    """
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env=dict(os.environ) | {"PYTHONPATH": path} | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    gpu, told = done.stdout.split()[-2:]
    return gpu, told


def told_here(name: str) -> str:
    """Return this process's digest, of one request at a time."""
    with devices.subject(name) as subject:  # skips where there is no such device
        return digest(properties.alone(subject))


@pytest.mark.slow
@pytest.mark.parametrize("name", devices.parameters(devices.EXACT))
def test_another_process_says_the_same(name: str) -> None:
    here = told_here(name)
    assert told_by_another_process(name, {})[1] == here


@pytest.mark.parametrize("name", devices.parameters(ON_A_GPU))
def test_another_gpu_says_the_same(name: str) -> None:
    other = other_gpu()
    here = told_here(name)
    gpu, told = told_by_another_process(name, {"CUDA_VISIBLE_DEVICES": other})
    assert gpu != gpu_name(), "it saw this GPU"
    assert told == here
