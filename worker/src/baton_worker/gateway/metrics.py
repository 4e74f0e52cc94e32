"""What the gateway counts.

Owns the metric names. The parts that count are given this object; labels are bound here or where
their values are few and known.
"""

from __future__ import annotations

from baton_worker.identity import Role
from baton_worker.metrics import MetricFactory

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


ENDPOINTS = ("chat", "completion")
OUTCOMES = (
    "ok",
    "error",
    "client_gone",
    "gap_timeout",
    "logprobs_missing",
    "overlap_mismatch",
    "request_too_large",
    "shutting_down",
    "slow_client",
    "suspect_request",
    "timeout",
    "worker_lost",
    "workers_full",
)
REFUSALS = (
    "body_too_large",
    "content_type",
    "context_length_exceeded",
    "field_too_large",
    "gateway_full",
    "internal",
    "invalid_api_key",
    "invalid_json",
    "invalid_request",
    "invalid_type",
    "line_full",
    "model_not_found",
    "no_feature",
    "no_route",
    "no_usable_pair",
    "shutting_down",
    "suspect_request",
    "too_few_workers",
    "unsupported_parameter",
    "workers_full",
)
ABORTS = ("body_incomplete", "client_gone", "slow_client")
RETRIES = ("from_start", "from_token")
NOT_RETRIED = ("no_workers", "attempts", "suspect_request")
DROPPED = (
    "duplicate",
    "echo",
    "foreign_worker",
    "released_worker",
    "stale_attempt",
    "unknown_request",
)
"""Series that exist from the start: a rate sees nothing of the first event of a new series, and
where a worker dies that is all of them.
"""


class GatewayMetrics:
    """The gateway's metrics, ready to count."""

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self._requests = factory.counter(
            "baton_gateway_requests",
            "Generation requests that workers had and that ended; workers_full: those had no room,"
            " and no other could take over",
            ("endpoint", "outcome"),
        )
        self._refusals = factory.counter(
            "baton_gateway_refusals",
            "Requests answered with an error before a worker was touched; no_route: no such path"
            " or method",
            ("reason",),
        )
        self._aborts = factory.counter(
            "baton_gateway_client_aborts",
            "Requests ended because of their client, in line too",
            ("reason",),
        )
        self._retries = factory.counter(
            "baton_gateway_retries",
            "Attempts begun because a worker failed the one before: from the start, or behind the"
            " tokens that the client has",
            ("how",),
        )
        self._not_retried = factory.counter(
            "baton_gateway_retries_refused",
            "Choices that ended because no further attempt could begin",
            ("reason",),
        )
        self._dropped = factory.counter(
            "baton_gateway_rows_dropped", "Rows that were not delivered", ("reason",)
        )
        self.ttft = factory.histogram(
            "baton_gateway_time_to_first_token_seconds",
            "From the request's arrival to its first tokens in the gateway; a request for its"
            " prompt's logprobs alone has none",
            _LATENCY_BUCKETS,
        )
        self.inter_token = factory.histogram(
            "baton_gateway_inter_token_latency_seconds",
            "Per token: time between a choice's rows, divided by the later row's tokens",
            _GAP_BUCKETS,
        )
        self.lag = factory.histogram(
            "baton_gateway_loop_lag_seconds",
            "How long a batch of link events waited for the event loop",
            _LAG_BUCKETS,
        )
        self._add_dispatch(factory)
        self._add_counters(factory)
        self._begin_series(factory)

    def _begin_series(self, factory: MetricFactory) -> None:
        for endpoint in ENDPOINTS:
            for outcome in OUTCOMES:
                self._requests.labels(*factory.values(endpoint, outcome))
        for counter, values in (
            (self._refusals, REFUSALS),
            (self._aborts, ABORTS),
            (self._retries, RETRIES),
            (self._not_retried, NOT_RETRIED),
            (self._dropped, DROPPED),
        ):
            for value in values:
                counter.labels(*factory.values(value))

    def _add_dispatch(self, factory: MetricFactory) -> None:
        self._workers = factory.gauge(
            "baton_gateway_workers", "Workers linked and serving the model", ("worker_role",)
        )
        self.usable = factory.gauge(
            "baton_gateway_usable",
            "1 while workers are linked that can serve a request; without, /readyz says why not",
        )
        self._ejections = factory.counter(
            "baton_gateway_worker_ejections",
            "Workers ejected because they failed request after request",
            ("worker_role",),
        )
        self._ejected = factory.gauge(
            "baton_gateway_worker_ejected",
            "1 while a worker is given no request because it failed too many in a row, unless all"
            " of its kind do",
            ("worker", "worker_role"),
        )
        self._prompts = factory.counter(
            "baton_gateway_prompts",
            "Prompts given to a worker to compute, those of further attempts too, by its role",
            ("worker_role",),
        )
        self.in_line = factory.gauge(
            "baton_gateway_line_requests", "Requests that wait in line for room"
        )
        self.waiting_retries = factory.gauge(
            "baton_gateway_waiting_retries",
            "Choices that lost their worker and wait for room at another",
        )
        self.line_seconds = factory.histogram(
            "baton_gateway_line_wait_seconds",
            "How long requests that had to wait for room did so, refused ones included",
            _LATENCY_BUCKETS,
        )
        self._ejected_roles: dict[str, str] = {}
        for worker_role in Role:
            self._workers.labels(*factory.values(worker_role.label))
            self._ejections.labels(*factory.values(worker_role.label))
            self._prompts.labels(*factory.values(worker_role.label))

    def _add_counters(self, factory: MetricFactory) -> None:
        self.prompt_tokens = factory.counter(
            "baton_gateway_prompt_tokens",
            "Prompt tokens of requests that were given to workers, of each prompt once",
        )
        self.completion_tokens = factory.counter(
            "baton_gateway_completion_tokens",
            "Output tokens made for clients, also what one that left did not read; counted when"
            " their choice ends",
        )
        self.accepted = factory.counter(
            "baton_gateway_accepted_prediction_tokens",
            "Draft tokens among those, counted when their request ends",
        )
        self.rejected = factory.counter(
            "baton_gateway_rejected_prediction_tokens",
            "Draft tokens that verification refused, counted when their request ends",
        )
        self.live = factory.gauge("baton_gateway_live_requests", "Choices being generated")
        self.held_rows = factory.gauge("baton_gateway_hold_rows", "Rows waiting for a gap to close")
        self.overlap_mismatches = factory.counter(
            "baton_gateway_overlap_mismatches",
            "Requests ended because rows contradicted each other",
        )
        self.gap_timeouts = factory.counter(
            "baton_gateway_gap_timeouts", "Requests ended because a gap between rows stayed open"
        )

    def ended(self, endpoint: str, outcome: str) -> None:
        """Count a generation request that ended."""
        self._requests.labels(*self._factory.values(endpoint, outcome)).inc()

    def prompt_given(self, worker_role: str) -> None:
        """Count a prompt that a worker of this role is to compute."""
        self._prompts.labels(*self._factory.values(worker_role)).inc()

    def refused(self, reason: str) -> None:
        """Count a request that was answered with an error before any worker knew of it."""
        self._refusals.labels(*self._factory.values(reason)).inc()

    def retried(self, how: str) -> None:
        """Count another attempt at a choice."""
        self._retries.labels(*self._factory.values(how)).inc()

    def not_retried(self, reason: str) -> None:
        """Count a choice that could not be tried again."""
        self._not_retried.labels(*self._factory.values(reason)).inc()

    def ejected(self, worker: str, worker_role: str) -> None:
        """Count and show a worker that is ejected."""
        self._ejections.labels(*self._factory.values(worker_role)).inc()
        self._ejected.labels(*self._factory.values(worker, worker_role)).set(1)
        self._ejected_roles[worker] = worker_role

    def forget_worker(self, worker: str) -> None:
        """Show a worker no more that was ejected: it is restored, or gone."""
        worker_role = self._ejected_roles.pop(worker, None)
        if worker_role is not None:
            self._ejected.remove(*self._factory.values(worker, worker_role))

    def client_aborted(self, reason: str) -> None:
        """Count a request whose client left, or read too slowly."""
        self._aborts.labels(*self._factory.values(reason)).inc()

    def dropped(self, reason: str, rows: int = 1) -> None:
        """Count rows that were not delivered."""
        self._dropped.labels(*self._factory.values(reason)).inc(rows)

    def workers(self, worker_role: str, count: int) -> None:
        """Set how many workers of a role are linked."""
        self._workers.labels(*self._factory.values(worker_role)).set(count)
