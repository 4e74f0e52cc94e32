"""Metric construction: every Prometheus metric of a process, with its constant labels.

A process builds one `MetricFactory` and hands it to the parts that count. Parts own their names in
a `metrics.py` of their own; nothing registers at import time, so a test may build as many
registries as it likes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class CountingHistogram(Histogram):
    """A histogram that takes equal observations at once.

    The library's `observe` takes one at a time, and would be an eighth of the gateway's whole work
    per row, and of the engine thread's.
    """

    def observe_many(self, amount: float, count: int) -> None:
        """Count `count` observations of `amount`."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


@dataclass(frozen=True, slots=True)
class MetricFactory:
    """Builds metrics named `baton_*` that all carry the labels `model` and `role`.

    A metric without labels of its own is ready to use; one with `labels` is used as
    `metric.labels(*factory.values("reason"))`, best bound once where it is counted.
    """

    registry: CollectorRegistry
    model: str
    role: str

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Return a counter; Prometheus appends `_total`."""
        metric = Counter(name, documentation, ("model", "role", *labels), registry=self.registry)
        return metric if labels else metric.labels(self.model, self.role)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """Return a gauge."""
        metric = Gauge(name, documentation, ("model", "role", *labels), registry=self.registry)
        return metric if labels else metric.labels(self.model, self.role)

    def histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> CountingHistogram:
        """Return a histogram with `buckets` (upper bounds in the unit that the name ends with)."""
        metric = CountingHistogram(
            name,
            documentation,
            ("model", "role", *labels),
            buckets=tuple(buckets),
            registry=self.registry,
        )
        return metric if labels else metric.labels(self.model, self.role)

    def values(self, *extra: str) -> tuple[str, ...]:
        """Return the full label values for a metric with labels of its own."""
        return (self.model, self.role, *extra)
