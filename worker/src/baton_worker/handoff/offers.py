"""Open offers on the prefill side: when to send again, when to give up, which answer counts.

Pure state, no socket and no clock: the transport passes `now`. An offer is sent at once, sent again
every `retry_seconds` until decode says RECEIVED, and ends with IMPORTED, REFUSED or its deadline. A
connection that breaks takes answers with it, so what it carried is sent again over the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton_worker.engine.api import Handoff
from baton_worker.handoff.api import HandoffDelivered, HandoffFailed
from baton_worker.handoff.frames import Answer, AnswerKind
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode

_BLOCKED_RETRY_SECONDS = 0.005


class Address(NamedTuple):
    """Who is spoken to: a process with other keys at the same endpoint is somebody else."""

    endpoint: str
    public_key: str


def address_of(target: DecodeTarget) -> Address:
    """Return where a target takes KV."""
    return Address(target.kv_endpoint, target.kv_public_key)


@dataclass(slots=True, eq=False)
class Offer:
    """One handoff under way."""

    key: RequestKey
    target: DecodeTarget
    handoff: Handoff
    offered_at_seconds: float
    deadline_at_seconds: float
    next_send_at_seconds: float
    received_at_seconds: float | None = None
    sends: int = 0

    @property
    def is_received(self) -> bool:
        """Whether decode said that the KV has arrived."""
        return self.received_at_seconds is not None

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that the offer carries."""
        return sum(array.nbytes for array in self.handoff.kv)


@dataclass(slots=True)
class OfferBook:
    """All open offers of one prefill worker."""

    retry_seconds: float
    _offers: dict[RequestKey, Offer] = field(default_factory=dict, init=False)

    def open(
        self, target: DecodeTarget, handoff: Handoff, deadline_seconds: float, now: float
    ) -> None:
        """Start an offer; it is due at once."""
        key = RequestKey(handoff.state.handle, handoff.state.attempt)
        deadline = now + deadline_seconds
        self._offers[key] = Offer(key, target, handoff, now, deadline, next_send_at_seconds=now)

    def cancel(self, key: RequestKey) -> None:
        """Forget an offer, if it is still open."""
        self._offers.pop(key, None)

    def due(self, now: float) -> list[Offer]:
        """Return offers to send now; report each with `sent` or `blocked`."""
        waiting = [o for o in self._offers.values() if not o.is_received]
        return [o for o in waiting if o.next_send_at_seconds <= now]

    def sent(self, offer: Offer, now: float) -> None:
        """The offer went out: send it again only after `retry_seconds` without an answer."""
        offer.sends += 1
        offer.next_send_at_seconds = now + self.retry_seconds

    def blocked(self, offer: Offer, now: float) -> None:
        """The socket took nothing (not connected yet, or full): try again soon."""
        offer.next_send_at_seconds = now + _BLOCKED_RETRY_SECONDS

    def answer(self, answer: Answer, now: float) -> HandoffDelivered | HandoffFailed | None:
        """Apply decode's answer; None when it ends nothing (RECEIVED, or an offer long over)."""
        offer = self._offers.get(answer.key)
        if offer is None:
            return None
        if answer.kind == AnswerKind.RECEIVED:
            if offer.received_at_seconds is None:
                offer.received_at_seconds = now
            return None
        del self._offers[offer.key]
        if answer.kind == AnswerKind.IMPORTED:
            return _delivered(offer, now)
        return HandoffFailed(offer.key, answer.error, answer.message)

    def is_for_another(self, key: RequestKey, sender: Address) -> bool:
        """Whether an answer is about an offer that was made to somebody else than its sender."""
        offer = self._offers.get(key)
        return offer is not None and address_of(offer.target) != sender

    def holds(self, offer: Offer) -> bool:
        """Whether this offer is still open."""
        return self._offers.get(offer.key) is offer

    def addresses(self) -> frozenset[Address]:
        """Return where open offers go."""
        return frozenset(address_of(offer.target) for offer in self._offers.values())

    def connection_lost(self, address: Address, now: float) -> None:
        """Send again what a broken connection carried: decode's answer may have died with it."""
        for offer in self._offers.values():
            if address_of(offer.target) == address:
                offer.received_at_seconds = None
                offer.next_send_at_seconds = now

    def overdue(self, now: float) -> list[Offer]:
        """Return offers whose deadline has passed; end each with `give_up`."""
        return [o for o in self._offers.values() if o.deadline_at_seconds <= now]

    def give_up(self, offer: Offer) -> HandoffFailed:
        """End an open offer for want of an answer."""
        del self._offers[offer.key]
        return HandoffFailed(offer.key, ErrorCode.HANDOFF_TIMEOUT, _too_late(offer))

    def next_event_in(self, now: float) -> float | None:
        """Return seconds until a send or a deadline is due; None when nothing is open."""
        times = [
            min(o.deadline_at_seconds, float("inf") if o.is_received else o.next_send_at_seconds)
            for o in self._offers.values()
        ]
        return max(0.0, min(times) - now) if times else None

    @property
    def n_open(self) -> int:
        """Offers without an outcome."""
        return len(self._offers)


def _delivered(offer: Offer, now: float) -> HandoffDelivered:
    """An import whose receipt was lost had at least arrived: all its time counts as transfer."""
    received = now if offer.received_at_seconds is None else offer.received_at_seconds
    started = offer.offered_at_seconds
    return HandoffDelivered(offer.key, now - started, offer.kv_bytes, received - started)


def _too_late(offer: Offer) -> str:
    waited = offer.deadline_at_seconds - offer.offered_at_seconds
    state = "received but not imported" if offer.is_received else "never confirmed"
    return f"{offer.target.worker_id} {state} the handoff in {waited:.1f} s ({offer.sends} sends)"
