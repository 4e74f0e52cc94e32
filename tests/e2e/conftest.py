"""Real deployments on loopback, started and ended by the tests that use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_testing.local_deployment import Deployment, start
from baton_testing.processes import PATIENCE_SECONDS
from baton_testing.tiny_model import TINY_MODEL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def start_deployment() -> Callable[..., contextlib.AbstractContextManager[Deployment]]:
    return start


@pytest.fixture(scope="session")
def patience() -> float:
    """Seconds that a condition may take."""
    return PATIENCE_SECONDS


@pytest.fixture(scope="session")
def pair() -> Iterator[Deployment]:
    """One prefill and one decode process, two drafts a step; every test leaves it so."""
    with start("-k", "2") as deployment:
        deployment.wait_lines(3)
        yield deployment


@pytest.fixture(scope="session")
def mixed() -> Iterator[Deployment]:
    """One mixed process without speculation: the plainest path there is."""
    with start("--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0") as deployment:
        deployment.wait_lines(2)
        yield deployment


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return TINY_MODEL
