"""Workers and gateway die and come back as the version before, then as this one: all is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_faults.fleet import previous_version
from baton_faults.history import WHOLE
from baton_faults.load import BROKEN, REFUSED
from baton_faults.steady import (
    assert_whole_at_once,
    ends_of,
    recorded_fleet,
    steady,
    wait_served,
)

pytestmark = pytest.mark.e2e


@pytest.fixture
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = previous_version(tmp_path_factory.mktemp("older"))
    if source is None:
        pytest.skip("a clone without history has no version before this one: NOT TESTED")
    return source


def test_a_pair_that_comes_back_older_and_newer_loses_no_request(
    tmp_path: Path, older: Path
) -> None:
    with recorded_fleet(tmp_path) as running:
        with steady(running, at_least=300) as load:
            for source in (older, None):
                for name in ("prefill-0", "decode-0"):
                    wait_served(load, 30)
                    running.kill(name)
                    running.start(name, source=source)
                    running.wait_usable()
        assert_whole_at_once(load)
        running.wait_empty()


def test_an_older_gateway_serves_with_these_workers_and_back(tmp_path: Path, older: Path) -> None:
    with recorded_fleet(tmp_path) as running:
        with steady(running, at_least=200) as load:
            for source in (older, None):
                wait_served(load, 30)
                running.kill("gateway")
                running.start("gateway", source=source)
                running.wait_usable()
        assert set(ends_of(load)) <= {WHOLE, BROKEN, f"{REFUSED}503"}, load.log.problems
        running.wait_empty()
