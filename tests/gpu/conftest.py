"""The subjects of the exactness suite: models on the GPU, and a small one that tries the suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_reports
import pytest

from baton_testing.exactness import devices, properties
from baton_testing.exactness.said import Said
from baton_testing.exactness.subjects import Subject


@pytest.fixture(scope="session", params=devices.parameters(devices.EXACT))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A model on a device, its weights loaded once for all that is asked of it."""
    with devices.subject(request.param) as found:
        yield found


@pytest.fixture(scope="session")
def alone(subject: Subject) -> list[Said]:
    """What each of the subject's requests is told when it is the only one."""
    return properties.alone(subject)


@pytest.fixture(scope="session")
def keep_digest() -> Callable[[str, str], None]:
    """`keep(name, digest)`: put it in the folder where `make gpu-test` looks for the stamp's."""
    place = os.environ.get("BATON_GPU_DIGESTS")

    def keep(name: str, digest: str) -> None:
        if place is not None:
            gpu_reports.kept(name, digest, Path(place))

    return keep
