"""`baton_cluster.waiting`: looks grow rare in a long wait, but not those that are judged too."""

from __future__ import annotations

import runpy
import threading
import time
from pathlib import Path

import pytest

WAITING = Path(__file__).resolve().parents[1] / "cluster" / "baton_cluster" / "waiting.py"


@pytest.mark.parametrize("watches", [False, True])
def test_only_what_is_not_watched_is_looked_at_more_seldom(
    monkeypatch: pytest.MonkeyPatch, watches: bool
) -> None:
    waiting, now, pauses = runpy.run_path(str(WAITING)), [0.0], list[float]()

    class Pause:
        def wait(self, seconds: float) -> None:
            pauses.append(seconds)
            now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threading, "Event", Pause)
    waiting["wait_until"]("a minute is over", lambda: now[0] > 60, 90, 0.05, watches=watches)
    assert pauses[0] == 0.05
    assert max(pauses) == (0.05 if watches else waiting["MOST_PAUSE_SECONDS"])
