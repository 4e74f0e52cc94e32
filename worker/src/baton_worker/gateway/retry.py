"""Tries a request again on other workers when one of its own is lost or cannot serve it.

The next attempt is told what the client has been given and goes on behind it: the engine takes
those tokens as output that it already gave, as it does after a preemption, so penalties, lengths
and the noise of a seed are those of an undisturbed run. Nothing is given twice and nothing is lost,
since the merge goes on at the same position and rows of earlier attempts are stale. What one model
began no other goes on with. Where no worker can do that, the request ends with the error that it
would have had.
"""

from __future__ import annotations

import logging

from baton_worker.gateway.commands import commands_of, send_all
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.pairing import weights_of
from baton_worker.gateway.requests import LiveRequest, LiveRequests
from baton_worker.gateway.workers import WorkerTable
from baton_worker.link.api import GatewayLink
from baton_worker.messages import RESUME
from baton_worker.records.columns import ErrorCode

log = logging.getLogger(__name__)

OF_DECODE = frozenset(
    {
        ErrorCode.HANDOFF_TIMEOUT,
        ErrorCode.HANDOFF_REFUSED,
        ErrorCode.HANDOFF_PEER_LOST,
        ErrorCode.DECODE_FULL,
    }
)
"""What prefill may report and decode is the cause of."""

RETRYABLE = OF_DECODE | {
    ErrorCode.QUEUE_FULL,
    ErrorCode.RESERVATION_EXPIRED,
    ErrorCode.DRAINING,
}
"""What ends an attempt without a fault of the request, so that another worker may do better."""


class Retrier:
    """Moves live requests to other workers, each at most `max_retries` times."""

    def __init__(
        self,
        link: GatewayLink,
        workers: WorkerTable,
        requests: LiveRequests,
        metrics: GatewayMetrics,
        *,
        max_retries: int,
        reserve_seconds: float,
    ) -> None:
        self._link = link
        self._workers = workers
        self._requests = requests
        self._metrics = metrics
        self._max_retries = max_retries
        self._reserve_seconds = reserve_seconds

    def retry(self, live: LiveRequest, avoid: str, why: str) -> bool:
        """Begin another attempt; False if there can be none: the caller ends the request.

        Args:
            live: a live request whose attempt cannot go on.
            avoid: the worker at fault; no later attempt goes there.
            why: for the log.
        """
        while live.key.attempt < self._max_retries:
            live.avoided |= {avoid}
            n_given = len(live.merge.delivered)
            needs = live.needs
            if n_given:
                features = (*needs.features, RESUME)
                needs = needs._replace(features=features, weights=live.weights)
            pair = self._workers.assign(needs, live.avoided)
            if pair is None:
                self._metrics.not_retried("no_workers")
                return False
            live.weights = weights_of(pair.prefill.info)
            self._requests.begin_attempt(live, pair.worker_ids)
            facts = {"handle": f"{live.key.handle:x}", "attempt": live.key.attempt, "why": why}
            log.warning("a request is tried again", extra=facts | {"after_tokens": n_given})
            self._metrics.retried("from_token" if n_given else "from_start")
            unsent = send_all(self._link, commands_of(live, pair, self._reserve_seconds))
            if unsent is None:
                return True
            avoid = unsent.worker_id
        self._metrics.not_retried("attempts")
        return False

    def avoid_of(self, live: LiveRequest, reporter: str, code: ErrorCode) -> str | None:
        """Return which worker to do without after an error row; None: a retry would not help."""
        if code not in RETRYABLE:
            return None
        return live.holders[-1] if code in OF_DECODE else reporter
