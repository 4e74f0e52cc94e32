"""What seeded examples of the operator's tests depend on."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers


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
