"""What a role counts beyond its engine, link and KV transport."""

from __future__ import annotations

import enum
from collections.abc import Callable

from baton_worker.identity import RequestKey
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode, StepColumns
from baton_worker.roles.rows import emitting_keys

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Outcome(enum.StrEnum):
    """How a request left a worker."""

    FINISHED = "finished"
    HANDED_OVER = "handed_over"
    ABORTED = "aborted"
    FAILED = "failed"


class RoleMetrics:
    """Requests by what became of them here, and decode's share of the handoff."""

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self._imported_at: dict[RequestKey, float] = {}
        self.live = factory.gauge("baton_live_requests", "Requests this worker owes an ending")
        self.reserved = factory.gauge(
            "baton_reserved_requests", "Handoffs expected or pending on this worker"
        )
        self._first_emit_seconds = factory.histogram(
            "baton_first_emit_seconds",
            "Decode: from a handoff's import to publishing the first tokens of its own",
            _SECONDS,
        )
        self.engine_suspect = factory.gauge(
            "baton_engine_suspect",
            "1 while the engine has made no progress for half of the time after which the process "
            "ends; new requests go elsewhere meanwhile",
        )
        self.engine_stalls = factory.counter(
            "baton_engine_stalls", "How often the engine seemed to hang"
        )
        self._requests = factory.counter(
            "baton_worker_requests",
            "Requests by how they left this worker: finished, handed_over (decode has it), aborted "
            "(its gateway said so, here or to decode, or is gone) or failed (see "
            "baton_worker_refused_total)",
            labels=("outcome",),
        )
        for outcome in Outcome:
            self._requests.labels(*factory.values(outcome))
        self._refused = factory.counter(
            "baton_worker_refused",
            "Requests ended by this worker with an error, by code",
            labels=("reason",),
        )
        for code in ErrorCode:
            self._refused.labels(*factory.values(code.name.lower()))
        self._wire = factory.gauge(
            "baton_wire_info",
            "Wire range and compatibility of this process; always 1",
            labels=("wire", "accepts_min", "accepts_max", "config_hash", "revision"),
        )

    def follow(self, n_live: Callable[[], int], n_reserved: Callable[[], int]) -> None:
        """Tell these counts whenever somebody asks, from whatever thread.

        A client may have its whole answer before the turn that published it ends.
        """
        self.live.set_function(n_live)
        self.reserved.set_function(n_reserved)

    def imported(self, key: RequestKey, now: float) -> None:
        """A request's KV is in the pool: the time until it publishes begins."""
        self._imported_at[key] = now

    def emitted(self, columns: StepColumns, now: float) -> None:
        """These rows were published: take the times of requests that had none before."""
        for key in emitting_keys(columns) if self._imported_at else ():
            imported_at = self._imported_at.pop(key, None)
            if imported_at is not None:
                self._first_emit_seconds.observe(now - imported_at)

    def gone(self, key: RequestKey) -> None:
        """It has left, and publishes no more."""
        self._imported_at.pop(key, None)

    def suspect(self, is_suspect: bool) -> None:
        """Tell that the engine seems to hang, or does not any more."""
        self.engine_suspect.set(is_suspect)
        if is_suspect:
            self.engine_stalls.inc()

    def left(self, outcome: Outcome) -> None:
        """Count a request that left."""
        self._requests.labels(*self._factory.values(outcome)).inc()

    def refused(self, code: ErrorCode) -> None:
        """Count a request that this worker ended with an error row."""
        self._refused.labels(*self._factory.values(code.name.lower())).inc()

    def wire(
        self, version: int, lowest: int, highest: int, config_hash: str, revision: str
    ) -> None:
        """Publish the pod contract's `baton_wire_info`."""
        values = (str(version), str(lowest), str(highest), config_hash, revision)
        self._wire.labels(*self._factory.values(*values)).set(1)
