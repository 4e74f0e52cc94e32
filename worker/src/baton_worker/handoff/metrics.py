"""What KV transfer counts."""

from __future__ import annotations

import threading
from collections import Counter

from baton_worker.handoff.api import HandoffDelivered, HandoffFailed
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode

FAILURES = (ErrorCode.HANDOFF_TIMEOUT, ErrorCode.HANDOFF_REFUSED, ErrorCode.HANDOFF_PEER_LOST)
"""Outcomes whose series exist from the start: a rate sees nothing of a new series' first event."""

HELD_UP = ("slots", "bytes", "tokens", "order", "share", "line", "displaced", "unasked")
"""Why a request has no place at once: what decode is short of, who stands before it, its sender's
share; or it is refused one: the line is full, others need its room there, KV came unasked.
"""

TRANSPORTS = ("zmq", "nvlink", "shm", "nixl")

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class PlaceMetrics:
    """Places at decode: who waits for one, how long, and what is promised."""

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self._held_up = factory.counter(
            "baton_handoff_places_held_up",
            "Decode: requests that got no place at once (slots, bytes, tokens: what is short; "
            "order: others are before them; share: their sender holds more than its share) or no "
            "place at all (line: it is full; displaced: their sender filled it; unasked: KV that "
            "came without a place and found no room)",
            labels=("reason",),
        )
        for reason in HELD_UP:
            self._held_up.labels(*factory.values(reason))
        self.granted_seconds = factory.histogram(
            "baton_handoff_place_seconds",
            "Prefill: from asking decode for a place to having it; the prompt is computed then",
            (*_SECONDS, 30, 60, 120, 300),
        )
        self.own_prompts = factory.counter(
            "baton_handoff_own_prompts",
            "Decode: prompts that got a place to be computed here, by no prefill worker",
        )
        self.waiting = factory.gauge(
            "baton_handoff_waiting_asks", "Decode: requests in line for a place"
        )
        self.taken = factory.gauge(
            "baton_handoff_places_taken",
            "Decode: requests that have a place: promised, here or running",
        )
        self.expired = factory.counter(
            "baton_handoff_places_expired",
            "Decode: requests in line for a place, or with one and no KV, given up after "
            "handoff.queue_seconds",
        )
        self.awaited_bytes = factory.gauge(
            "baton_handoff_awaited_bytes",
            "Decode: KV promised a place or here and not imported, at most handoff.receive_bytes, "
            "and one request more whose sender held nothing while another held too much",
        )

    def held_up(self, reason: str) -> None:
        """Count a request that has no place, by reason: see `HELD_UP`."""
        self._held_up.labels(*self._factory.values(reason)).inc()


class PoolMetrics:
    """KV pools that decode reads, and how much KV went which way."""

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self.mapped = factory.gauge(
            "baton_handoff_mapped_pools",
            "Decode: KV pools of prefill workers that are read here, mapped or by NIXL",
        )
        self._refused = factory.counter(
            "baton_handoff_pools_refused",
            "Decode: KV pools that are neither mapped nor read (unfit), or whose owner is of "
            "another user or one too many (stranger), or called and said nothing of any (silent)",
            labels=("reason",),
        )
        for reason in ("unfit", "stranger", "silent"):
            self._refused.labels(*factory.values(reason))
        self._delivered_bytes = factory.counter(
            "baton_handoff_delivered_bytes",
            "Prefill: KV that decode has, by the way that it took: zmq (sent), nvlink, shm or nixl "
            "(read by decode out of this worker's pool)",
            labels=("transport",),
        )
        for transport in TRANSPORTS:
            self._delivered_bytes.labels(*factory.values(transport))

        self._pulled_bytes = factory.counter(
            "baton_handoff_pulled_bytes",
            "Decode: KV that was read out of a prefill worker's pool; over the seconds, the rate",
            labels=("transport", "prefill"),
        )
        self._pulling_seconds = factory.counter(
            "baton_handoff_pulling_seconds",
            "Decode: what reading that took, from each read's beginning to its end",
            labels=("transport", "prefill"),
        )
        self._lost = factory.counter(
            "baton_handoff_pools_lost",
            "Decode: KV pools that could be read and then failed, as when their worker dies",
        )
        self._unheeded = factory.counter(
            "baton_handoff_unheeded_words",
            "Decode: words of what a prompt has filled that were not passed on, by why (place: its "
            "request has none from this sender, or it is used; blocks: none, or more than it has "
            "tokens; pool: not known here)",
            labels=("reason",),
        )
        for reason in ("place", "blocks", "pool"):
            self._unheeded.labels(*factory.values(reason))
        self._read = Counter[tuple[str, str]]()
        self._lock = threading.Lock()

    def found(self, transport: str, prefill: str) -> None:
        """A pool of a prefill worker is read from now on, until `forget`."""
        self.mapped.inc()
        with self._lock:
            self._read[transport, prefill] += 1

    def pulled(self, transport: str, prefill: str, n_bytes: int, seconds: float) -> None:
        """Count KV that was read, and how long that took; what comes after its owner has gone would
        be a series that nobody drops. May be called on any thread.
        """
        labels = self._factory.values(transport, prefill)
        with self._lock:
            if self._read[transport, prefill]:
                self._pulled_bytes.labels(*labels).inc(n_bytes)
                self._pulling_seconds.labels(*labels).inc(seconds)

    def forget(self, transport: str, prefill: str) -> None:
        """A pool is read no more. Drop the series of a prefill worker that has no other one: names
        of pods come and go for ever.
        """
        labels = self._factory.values(transport, prefill)
        with self._lock:
            self._read[transport, prefill] -= 1
            if self._read[transport, prefill] <= 0:
                del self._read[transport, prefill]
                for counter in (self._pulled_bytes, self._pulling_seconds):
                    counter.remove(*labels)
        # Last: who sees that there is one pool less finds nothing left of it.
        self.mapped.dec()

    def lost(self) -> None:
        """Count a pool that is read no more."""
        self._lost.inc()

    def unheeded(self, reason: str) -> None:
        """Count a word of filled blocks that was not passed on."""
        self._unheeded.labels(*self._factory.values(reason)).inc()

    def delivered(self, transport: str, n_bytes: int) -> None:
        """Count KV that decode has, by transport: see `TRANSPORTS`."""
        self._delivered_bytes.labels(*self._factory.values(transport)).inc(n_bytes)

    def refused(self, reason: str) -> None:
        """Count a pool that was not mapped."""
        self._refused.labels(*self._factory.values(reason)).inc()


_SENT = "KV bytes sent to decode, each time; none of KV that decode reads out of the pool"
_RECEIVED = "KV bytes that were sent to this worker; what it reads is baton_handoff_pulled_bytes"
_OUTCOMES = ("delivered", "cancelled", "unanswered", "unimported")


class HandoffMetrics:
    """Counters of both directions; bytes are KV payload."""

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self.seconds = factory.histogram(
            "baton_handoff_seconds",
            "From offering a handoff to its acknowledgement (KV imported by decode)",
            _SECONDS,
        )
        self.transfer_seconds = factory.histogram(
            "baton_handoff_transfer_seconds",
            "First part of it: from the offer to decode's word that the KV has arrived",
            _SECONDS,
        )
        self.import_seconds = factory.histogram(
            "baton_handoff_import_seconds",
            "The rest of it: decode's queue, its wait for a step, and the copy into its pool",
            _SECONDS,
        )
        self.places = PlaceMetrics(factory)
        self.flying_bytes = factory.gauge(
            "baton_handoff_flying_bytes",
            "Prefill: KV sent and not confirmed, per decode worker at most handoff.send_bytes",
        )
        self.sent_bytes = factory.counter("baton_handoff_sent_bytes", _SENT)
        self.received_bytes = factory.counter("baton_handoff_received_bytes", _RECEIVED)
        self.pools = PoolMetrics(factory)
        self.resent = factory.counter(
            "baton_handoff_resent", "Offers sent again because their connection broke"
        )
        self.send_blocked = factory.counter(
            "baton_handoff_send_blocked", "Sends put off because the socket took nothing"
        )
        self.malformed = factory.counter(
            "baton_handoff_malformed", "Messages on the KV channel that were refused as malformed"
        )
        self.open_offers = factory.gauge("baton_handoff_open_offers", "Offers without an outcome")
        self._outcomes = factory.counter(
            "baton_handoff_outcomes",
            "Offers by outcome, and asks for a place that came to none (cancelled: the request"
            " ended before decode's answer was read, or decode heard so first; unanswered: it"
            " ended, and decode was silent about it for a second or more, or the connection to it"
            " had broken; unimported: it ended, and decode had had its KV for a second or more"
            " without importing it)",
            labels=("outcome",),
        )
        for outcome in (*_OUTCOMES, *(code.name.lower() for code in FAILURES)):
            self._outcomes.labels(*factory.values(outcome))
        self._handshakes = factory.counter(
            "baton_handoff_handshakes_refused",
            "Connections to the KV port that CURVE refused, by reason",
            labels=("reason",),
        )
        self._refused = factory.counter(
            "baton_handoff_refused",
            "Asks and offers that this worker refused, by reason (over: of requests that their"
            " gateway had aborted, as when clients leave)",
            labels=("reason",),
        )

    def outcome(self, event: HandoffDelivered | HandoffFailed) -> None:
        """Count how an offer ended."""
        if isinstance(event, HandoffDelivered):
            self.seconds.observe(event.seconds)
            self.transfer_seconds.observe(event.transfer_seconds)
            self.import_seconds.observe(event.seconds - event.transfer_seconds)
            self._outcomes.labels(*self._factory.values("delivered")).inc()
        else:
            self.failed(event)

    def cancelled(self) -> None:
        """Count an offer whose request ended while it was open."""
        self._outcomes.labels(*self._factory.values("cancelled")).inc()

    def unanswered(self) -> None:
        """Count an offer or an ask whose request ended while decode was silent about it."""
        self._outcomes.labels(*self._factory.values("unanswered")).inc()

    def unimported(self) -> None:
        """Count an offer whose request ended while its KV lay at decode."""
        self._outcomes.labels(*self._factory.values("unimported")).inc()

    def failed(self, failure: HandoffFailed) -> None:
        """Count an offer that ended without delivery."""
        outcome = "cancelled" if failure.is_over else failure.code.name.lower()
        self._outcomes.labels(*self._factory.values(outcome)).inc()

    def refused(self, code: ErrorCode | None) -> None:
        """Count an offer turned away on the receiving side; without a code: it was over."""
        reason = "over" if code is None else code.name.lower()
        self._refused.labels(*self._factory.values(reason)).inc()

    def handshake_refused(self, reason: str) -> None:
        """Count a connection that was not allowed."""
        self._handshakes.labels(*self._factory.values(reason)).inc()
