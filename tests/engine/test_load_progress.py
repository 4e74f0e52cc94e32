"""How far a load has come is told in bytes: to probes at any time, to the log at a steady pace."""

from __future__ import annotations

import pytest

from baton_worker.engine import load_progress
from baton_worker.engine.load_progress import STILL_SECONDS, TOLD_SECONDS, Loading, LoadProgress

GB = 10**9


class Time:
    """Seconds that only a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def progress(clock: Time) -> LoadProgress:
    return LoadProgress(clock)


def test_it_is_told_in_bytes_share_and_rate(clock: Time, progress: LoadProgress) -> None:
    assert progress.now().told() == "loading weights: the checkpoint is opened"
    clock.now += 7
    progress.begin(153 * GB // 10)
    assert progress.now().told() == "loading weights: 0.0 of 15.3 GB (0 %), 0.0 GB/s"
    clock.now += 3.5
    progress.add(41 * GB // 10)
    assert progress.now().told() == "loading weights: 4.1 of 15.3 GB (26 %), 1.2 GB/s"
    clock.now += 10
    assert "0.3 GB/s" in progress.now().told(), "what stands still becomes slower"
    progress.finish()
    assert progress.now() == Loading(153 * GB // 10, 153 * GB // 10, 13.5, is_loaded=True)
    assert progress.now().told() == "weights are loaded, 15.3 GB: the engine is prepared"
    clock.now += 10
    assert progress.now().seconds == 13.5, "what it took does not grow any more"


def test_the_share_never_says_all_before_it_is(progress: LoadProgress) -> None:
    progress.begin(1000)
    progress.add(999)
    assert "(99 %)" in progress.now().told()


def test_the_log_has_a_line_each_few_seconds_whatever_the_number_of_pieces(
    clock: Time, progress: LoadProgress, caplog: pytest.LogCaptureFixture
) -> None:
    progress.begin(1000)
    with caplog.at_level("INFO", logger=load_progress.__name__):
        for _ in range(1000):
            clock.now += TOLD_SECONDS / 100
            progress.add(1)
        progress.finish()
    *steps, last = [(line.message, vars(line)["bytes_read"]) for line in caplog.records]
    assert 9 <= len(steps) <= 10
    assert all(message.startswith("loading weights: ") for message, _ in steps)
    assert last == ("weights are loaded", 1000)


def test_a_start_counts_as_hung_when_nothing_has_moved_for_long(
    clock: Time, progress: LoadProgress
) -> None:
    progress.begin(10)
    for move in (lambda: progress.add(1), progress.finish, lambda: None):
        clock.now += STILL_SECONDS
        assert not progress.is_overdue()
        assert progress.seconds_still() == STILL_SECONDS
        move()
    clock.now += 1
    assert progress.is_overdue()
