"""What holds for every test process: one BLAS thread, asyncio, and no test that fails by slowness.

OpenBLAS threads spin while they wait for each other. On a busy two-core machine that made the
float64 reference 20 times slower than one thread (measured: 23 s against 1.2 s for 300 forwards).
It must be set before NumPy loads, hence here and not in a fixture; child processes inherit it.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Generator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Imported before any test freezes the garbage collector: hypothesis asks it who refers to the
# random generators that plugins register, and after a freeze nobody does, which is a warning.
import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a red test is the change's doing and runs red again.
# `make explore` sets BATON_EXPLORE for new ones each time.
#
# How long an example takes says something of the machine and nothing of the claim. (The first text
# that is drawn in a fresh checkout has hypothesis build its Unicode tables: seconds, once.)
settings.register_profile(
    "baton",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="BATON_EXPLORE" not in os.environ,
)
settings.load_profile("baton")

# What tests share tells as much as a test does when it is not so.
pytest.register_assert_rewrite("baton_testing")

MATRICES = {"engine/device": 2, "engine/serving": 1, "ops/cuda_on_host": 2}
"""Folders of which a case is an engine that serves, or a kernel of hundreds of fibers, and how many
fast cases a test there has that does not say otherwise. Elsewhere it has all.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, of which all stays: a sixth of what that takes
    a process (measured: 6.6 s of a processor, and 7.8 with it).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow tests most combinations of values."""
    from baton_testing import combinations

    rest = items
    for folder, most in MATRICES.items():
        is_here = [item.nodeid.startswith(f"tests/{folder}/") for item in rest]
        combinations.leave_to_slow(itertools.compress(rest, is_here), most)
        rest = [item for item, here in zip(rest, is_here, strict=True) if not here]
    combinations.leave_to_slow(rest)


def pytest_collection_finish() -> None:
    """Have no collection of garbage walk the tests and their modules: each engine that starts on
    a device asks for some. With 14,690 tests known, those of engine/device took 70 s of a processor
    without this, and 60 with it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run tests that are coroutines on asyncio, which is what the processes run on."""
    return "asyncio"
