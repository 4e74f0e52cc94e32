"""When workers stepped, and how late a gateway's event loop was, one event behind the other.

    python -m baton_faults.pace JOURNAL gateway --config FILE

runs `baton-worker` with a recorder in its gateway. A line of the journal is `AT WHAT VALUE`: for a
record, when it came, its worker's name, and when that worker said to have sent it; for the event
loop, `lag` and how many nanoseconds link events waited for it. All times are this host's
CLOCK_REALTIME in nanoseconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

LAG = "lag"


class Noted(NamedTuple):
    """One line of a journal."""

    at_ns: int
    what: str
    value_ns: int


class Pace(NamedTuple):
    """Seconds: between a worker's steps, and those that the event loop was late."""

    gaps: list[float]
    lags: list[float]


def read(journal: Path) -> list[Noted]:
    """Return the lines of a journal; the last one of a running process may be cut off."""
    content = journal.read_text()
    lines = content[: content.rfind("\n") + 1].splitlines()
    return [Noted(int(at), what, int(value)) for at, what, value in map(str.split, lines)]


def within(noted: Iterable[Noted], worker: str, began_ns: int, ended_ns: int) -> Pace:
    """Return the pace of one worker and of the event loop between two times."""
    of_time = [one for one in noted if began_ns <= one.at_ns < ended_ns]
    sent = sorted(one.value_ns for one in of_time if one.what == worker)
    gaps = [(later - earlier) / 1e9 for earlier, later in pairwise(sent)]
    return Pace(gaps, [one.value_ns / 1e9 for one in of_time if one.what == LAG])


def main(journal: Path, arguments: list[str]) -> int:
    """Run `baton-worker` with a recorder in its gateway."""
    from baton_worker.gateway.metrics import GatewayMetrics
    from baton_worker.link.api import GatewayLinkEvent, StepReceived
    from baton_worker.link.gateway import ZmqGatewayLink
    from baton_worker.main import main as baton_worker
    from baton_worker.metrics import MetricFactory

    out = journal.open("a", buffering=1)
    start, init = ZmqGatewayLink.start, GatewayMetrics.__init__

    class Lag:
        """Writes down what the histogram is told."""

        def __init__(self, histogram: object) -> None:
            self._tell = histogram.observe  # type: ignore[attr-defined]

        def observe(self, seconds: float) -> None:
            self._tell(seconds)
            out.write(f"{time.time_ns()} {LAG} {round(seconds * 1e9)}\n")

    def made(metrics: GatewayMetrics, factory: MetricFactory) -> None:
        init(metrics, factory)
        metrics.lag = Lag(metrics.lag)  # type: ignore[assignment]

    def started(link: ZmqGatewayLink, on_events: object) -> None:
        def take(events: Sequence[GatewayLinkEvent]) -> None:
            now = time.time_ns()
            for event in events:
                if isinstance(event, StepReceived):
                    out.write(f"{now} {event.worker_id} {event.meta.sent_unix_ns}\n")
            on_events(events)  # type: ignore[operator]

        start(link, take)

    GatewayMetrics.__init__ = made  # type: ignore[method-assign]
    ZmqGatewayLink.start = started  # type: ignore[method-assign]
    return baton_worker(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
