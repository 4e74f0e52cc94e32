"""Every metric of the operator, on a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

RESULTS = ("ok", "throttled", "failed", "broken")
"""How a reconcile may end."""

CONDITIONS = ("Stalled", "CapacityBlocked", "PodsFailing", "PodsRefused", "HandoffFellBack")
"""What a PDDeployment says when somebody has to look at it."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class OperatorMetrics:
    """Counters and gauges; names begin with `baton_operator_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._reconciles = _reconciles(registry)
        self._reconcile_seconds = Histogram(
            "baton_operator_reconcile_duration_seconds",
            "Time of one reconcile",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_depth = Gauge(
            "baton_operator_queue_depth", "Keys that wait for a worker", registry=registry
        )
        self.queue_oldest_seconds = Gauge(
            "baton_operator_queue_oldest_seconds",
            "Age of the key that waits or runs longest",
            registry=registry,
        )
        self.children = Gauge(
            "baton_operator_children", "Child objects in the store", registry=registry
        )
        self.watch_age_seconds = Gauge(
            "baton_operator_watch_age_seconds",
            "Time since a kind's watch was last heard of; at most 90 s while all is well",
            ("kind",),
            registry=registry,
        )
        self.http_refused = _http_refused(registry)
        self.loop_faults = _loop_faults(registry)
        self._watch_restarts = _watch_restarts(registry)
        self._conditions = _conditions(registry)
        self._suspended = _suspended(registry)
        self._applies = Counter(
            "baton_operator_apply",
            "Children looked at, by kind and what became of them",
            ("kind", "result"),
            registry=registry,
        )
        self._requests = Counter(
            "baton_operator_api_requests",
            "API requests by verb, kind and HTTP status (0: not reached)",
            ("verb", "kind", "status"),
            registry=registry,
        )
        self._request_seconds = Histogram(
            "baton_operator_api_request_duration_seconds",
            "Time of one API request",
            ("verb",),
            buckets=_SECONDS,
            registry=registry,
        )
        # Looking a sample up by its labels costs more than counting.
        self._request_count = cache(self._requests.labels)
        self._request_time = cache(self._request_seconds.labels)
        self.is_leader = Gauge(
            "baton_operator_leader", "1 while this process leads", registry=registry
        )

    def reconciled(self, result: str, seconds: float) -> None:
        """Count one reconcile."""
        self._reconciles.labels(result).inc()
        self._reconcile_seconds.observe(seconds)

    def applied(self, kind: str, result: str) -> None:
        """Count one child."""
        self._applies.labels(kind, result).inc()

    def told(self, true: Mapping[str, int]) -> None:
        """Set of how many PDDeployments each condition is True, by type; others are of none."""
        for condition in CONDITIONS:
            self._conditions.labels(condition).set(true.get(condition, 0))

    def suspended(self, deployments: Iterable[str]) -> None:
        """Set which PDDeployments are suspended; others have no series."""
        self._suspended.clear()
        for deployment in deployments:
            self._suspended.labels(deployment).set(1)

    def watch_restarted(self, kind: str, reason: str) -> None:
        """Count one watch that broke."""
        self._watch_restarts.labels(kind, reason).inc()

    def requested(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """Count one API request."""
        self._request_count(verb, kind, str(status)).inc()
        self._request_time(verb).observe(seconds)


def _reconciles(registry: CollectorRegistry) -> Counter:
    counter = Counter(
        "baton_operator_reconcile", "Reconciles by result", ("result",), registry=registry
    )
    # From 0 on: the first failure of a series that begins with it is no increase to Prometheus.
    for result in RESULTS:
        counter.labels(result)
    return counter


def _http_refused(registry: CollectorRegistry) -> Counter:
    return Counter(
        "baton_operator_http_refused",
        "Connections to the operator's port that found too many others",
        registry=registry,
    )


def _loop_faults(registry: CollectorRegistry) -> Counter:
    counter = Counter(
        "baton_operator_loop_faults",
        "Exceptions of callbacks and of tasks that are done without, which nobody expected",
        ("where",),
        registry=registry,
    )
    for where in ("callback", "telemetry"):
        counter.labels(where)
    return counter


def _watch_restarts(registry: CollectorRegistry) -> Counter:
    return Counter(
        "baton_operator_watch_restarts",
        "Lists and watches that did not last, by kind and why: expired (the server lost our "
        "place), error, or empty (ended at once without a word)",
        ("kind", "reason"),
        registry=registry,
    )


def _conditions(registry: CollectorRegistry) -> Gauge:
    gauge = Gauge(
        "baton_operator_conditions",
        "PDDeployments of which a condition is True that somebody has to look at; 0 while this "
        "process does not lead",
        ("condition",),
        registry=registry,
    )
    for condition in CONDITIONS:
        gauge.labels(condition)
    return gauge


def _suspended(registry: CollectorRegistry) -> Gauge:
    return Gauge(
        "baton_operator_suspended",
        "1 for each PDDeployment, namespace/name, that is suspended on purpose: it has no workers, "
        "and the alert about that is silent",
        ("deployment",),
        registry=registry,
    )
