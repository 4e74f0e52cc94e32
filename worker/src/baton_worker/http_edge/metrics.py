"""What the HTTP listeners of a process count."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from baton_worker.metrics import MetricFactory
from baton_worker.supervision import LoopFaults


class HttpMetrics:
    """The metrics of every listener of a process; `listener` is api, health or control.

    Attributes:
        faults: what breaks on the listeners' event loops.
    """

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self.faults = LoopFaults(factory)
        self._connections = factory.gauge(
            "baton_http_connections", "HTTP connections that are open", ("listener",)
        )
        self._refused = factory.counter(
            "baton_http_refused",
            "HTTP connections and requests that a bound ended before any route saw them",
            ("listener", "reason"),
        )

    def connections(self, listener: str) -> Gauge:
        """Return the gauge of a listener's open connections."""
        return self._connections.labels(*self._factory.values(listener))

    def refused(self, listener: str, reason: str) -> Counter:
        """Return the counter of what a listener refused for a reason."""
        return self._refused.labels(*self._factory.values(listener, reason))
