"""Shared doubles of the operator's tests, offered as fixtures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers


def _load(name):
    key = f"baton_operator_tests_{name}"
    if key not in sys.modules:
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(key, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    return sys.modules[key]


@pytest.fixture(scope="session")
def fleets():
    """The module with `Fleet` and `make_spec`."""
    return _load("support_fleet")


@pytest.fixture(scope="session")
def kubes():
    """The module with `FakeKube` and what a reconciler on it needs."""
    return _load("support_kube")


@pytest.fixture(scope="session")
def keyed():
    """The module with `KeyedPods`."""
    return _load("support_keys")


@pytest.fixture
def same_in_every_run(monkeypatch):
    """Let seeded examples depend on their seed alone.

    Hypothesis also draws numbers that it reads in the source of every module of ours that is loaded
    (it has no setting for that), so a test added elsewhere would try other sequences here.
    """
    if settings().derandomize:
        monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
        providers.CONSTANTS_CACHE.cache.clear()
    yield
    providers.CONSTANTS_CACHE.cache.clear()
