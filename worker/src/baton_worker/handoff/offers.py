"""Open offers on the prefill side: what to send when, when to give up, which answer counts.

Pure state, no socket and no clock: the transport passes `now`, and which connections stand. To each
decode worker offers go out in their order, a window of unconfirmed bytes at a time, so that nothing
piles up in a socket. An offer is sent once per connection: what TCP carries needs no second copy,
and a connection that is stuck breaks (see `dealers`). Then all that it carried is sent again over
the next one, for decode's answers may have died with it.

The deadline bounds silence: it runs from the last sign of life of the other side, allows for the
bytes under way, and ends when decode says RECEIVED. From there on decode's own queue has a bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_worker.engine.api import Handoff, KvInPool
from baton_worker.handoff.api import HandoffDelivered, HandoffFailed
from baton_worker.handoff.frames import Answer, AnswerKind
from baton_worker.handoff.timers import Timers
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode

SLOWEST_BYTES_PER_SECOND = 1 << 20
"""What a connection carries at least while it works; a slower one counts as silent."""

PROMPT_SECONDS = 1.0
"""How long decode is silent at most while all is well: it answers at once, whatever it computes."""

_USUAL_BYTES_PER_SECOND = 16 << 20
"""What it may be silent for longer for: a slower connection is not well, though it works."""

_BLOCKED_RETRY_SECONDS = 0.005
_ABOUT_OFFERS = (AnswerKind.RECEIVED, AnswerKind.IMPORTED, AnswerKind.REFUSED)


class Address(NamedTuple):
    """Who is spoken to: a process with other keys at the same endpoint is somebody else."""

    endpoint: str
    public_key: str


def address_of(target: DecodeTarget) -> Address:
    """Return where a target takes KV."""
    return Address(target.kv_endpoint, target.kv_public_key)


@dataclass(slots=True, eq=False)
class Offer:
    """One handoff under way; `kv_bytes` is what it carries, `serial` its place among all.
    `was_cut`: a connection broke under it.
    """

    key: RequestKey
    target: DecodeTarget
    handoff: Handoff
    kv_bytes: int
    serial: int
    offered_at_seconds: float
    deadline_seconds: float
    received_at_seconds: float | None = None
    sends: int = 0
    was_cut: bool = False

    @property
    def address(self) -> Address:
        """Where it goes."""
        return address_of(self.target)

    @property
    def is_received(self) -> bool:
        """Whether decode said that the KV has arrived."""
        return self.received_at_seconds is not None


@dataclass(slots=True, eq=False)
class _Lane:
    """What goes to one address.

    Attributes:
        heard_at_seconds: the last sign of life: an answer, or that the connection came or went.
        waiting: offers to send, in order.
        flying: bytes sent and not confirmed, by offer; those of cancelled ones among them, for they
            are in the socket.
        received: offers whose KV is there and not imported.
        blocked_until_seconds: when to try a socket again that took nothing.
    """

    heard_at_seconds: float
    waiting: dict[RequestKey, Offer] = field(default_factory=dict)
    flying: dict[RequestKey, int] = field(default_factory=dict)
    received: dict[RequestKey, Offer] = field(default_factory=dict)
    flying_bytes: int = 0
    blocked_until_seconds: float | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.flying or self.received)

    def land(self, key: RequestKey) -> None:
        self.flying_bytes -= self.flying.pop(key, 0)


@dataclass(slots=True)
class OfferBook:
    """All open offers of one prefill worker.

    `window_bytes`: most unconfirmed bytes per address; one offer may be larger by itself.
    """

    window_bytes: int
    _offers: dict[RequestKey, Offer] = field(default_factory=dict, init=False)
    _lanes: dict[Address, _Lane] = field(default_factory=dict, init=False)
    _deadlines: Timers[RequestKey] = field(default_factory=Timers, init=False)
    _serials: Iterator[int] = field(default_factory=itertools.count, init=False)

    def open(
        self, target: DecodeTarget, handoff: Handoff, deadline_seconds: float, now: float
    ) -> None:
        """Start an offer behind those before it."""
        key = handoff.state.key
        kv_bytes = handoff.sent_bytes
        serial = next(self._serials)
        offer = Offer(key, target, handoff, kv_bytes, serial, now, deadline_seconds)
        self._offers[key] = offer
        self._lanes.setdefault(offer.address, _Lane(now)).waiting[key] = offer
        self._deadlines.set(key, now + deadline_seconds)

    def cancel(self, key: RequestKey) -> bool:
        """Forget an offer; return whether it was still open."""
        offer = self._offers.get(key)
        if offer is None:
            return False
        self._close(offer)
        return True

    def is_unanswered(self, key: RequestKey, now: float) -> bool:
        """Whether an offer is open to which decode should have said something by now: its end, if
        it is cancelled, hides that.
        """
        offer = self._offers.get(key)
        if offer is None or offer.is_received:
            return False
        allowed = PROMPT_SECONDS + self._under_way(offer) / _USUAL_BYTES_PER_SECOND
        return offer.was_cut or now - self._silent_since(offer) >= allowed

    def is_idle(self, key: RequestKey, now: float) -> bool:
        """Whether decode has had an offer's KV for some time and has not begun to import it, which
        a cancel hides: it waits for a slot there, or nobody works.
        """
        offer = self._offers.get(key)
        received = None if offer is None else offer.received_at_seconds
        return received is not None and now - received >= PROMPT_SECONDS

    def waiting_at(self) -> list[Address]:
        """Return where something waits to be sent."""
        return [address for address, lane in self._lanes.items() if lane.waiting]

    def next_to_send(self, address: Address, now: float) -> Offer | None:
        """Return the offer to send there now; report it with `sent` or `blocked`."""
        lane = self._lanes.get(address)
        if lane is None or not lane.waiting:
            return None
        if lane.blocked_until_seconds is not None and now < lane.blocked_until_seconds:
            return None
        offer = next(iter(lane.waiting.values()))
        if lane.flying and lane.flying_bytes + offer.kv_bytes > self.window_bytes:
            return None
        return offer

    def sent(self, offer: Offer) -> None:
        """The offer went out."""
        lane = self._lanes[offer.address]
        del lane.waiting[offer.key]
        lane.land(offer.key)
        lane.flying[offer.key] = offer.kv_bytes
        lane.flying_bytes += offer.kv_bytes
        lane.blocked_until_seconds = None
        offer.sends += 1

    def blocked(self, offer: Offer, now: float) -> None:
        """The socket took nothing: try again soon."""
        self._lanes[offer.address].blocked_until_seconds = now + _BLOCKED_RETRY_SECONDS

    def answer(
        self, address: Address, answer: Answer, now: float
    ) -> HandoffDelivered | HandoffFailed | None:
        """Apply decode's answer; None when it ends nothing (RECEIVED, or an offer long over)."""
        lane = self._lanes.get(address)
        if lane is None:
            return None
        lane.heard_at_seconds = now
        if answer.kind not in _ABOUT_OFFERS:  # nothing of it has landed
            return None
        lane.land(answer.key)
        offer = self._offers.get(answer.key)
        event = None
        if offer is not None and offer.address == address:
            event = self._answered(lane, offer, answer, now)
        self._tidy(address)
        return event

    def is_for_another(self, key: RequestKey, sender: Address) -> bool:
        """Whether an answer is about an offer that was made to somebody else than its sender."""
        offer = self._offers.get(key)
        return offer is not None and offer.address != sender

    def holds(self, offer: Offer) -> bool:
        """Whether this offer is still open."""
        return self._offers.get(offer.key) is offer

    def addresses(self) -> frozenset[Address]:
        """Return where offers go."""
        return frozenset(self._lanes)

    def connected(self, address: Address, now: float) -> None:
        """A connection stands: silence is counted from here."""
        lane = self._lanes.get(address)
        if lane is not None:
            lane.heard_at_seconds = now
            lane.blocked_until_seconds = None

    def connection_lost(self, address: Address, now: float) -> None:
        """Send again, in order, what a broken connection carried."""
        lane = self._lanes.get(address)
        if lane is None:
            return
        lane.heard_at_seconds = now
        carried = [self._offers[key] for key in lane.flying if key in self._offers]
        for offer in (*carried, *lane.received.values()):
            offer.received_at_seconds = None
            offer.was_cut = True
            self._deadlines.set(offer.key, now + offer.deadline_seconds)
        again = {offer.key: offer for offer in (*carried, *lane.received.values())}
        in_order = sorted((again | lane.waiting).values(), key=lambda offer: offer.serial)
        self._lanes[address] = _Lane(now, {offer.key: offer for offer in in_order})
        self._tidy(address)

    def fail(self, address: Address, message: str) -> list[HandoffFailed]:
        """End all that can never be sent, because the address is none."""
        offers = [offer for offer in self._offers.values() if offer.address == address]
        for offer in offers:
            self._close(offer)
        return [HandoffFailed(o.key, ErrorCode.HANDOFF_PEER_LOST, message) for o in offers]

    def overdue(self, now: float, standing: Container[Address]) -> list[Offer]:
        """Return offers whose deadline has passed; end each with `give_up`.

        Args:
            standing: addresses with a connection.
        """
        late: list[Offer] = []
        for key in self._deadlines.take_due(now):
            offer = self._offers[key]
            ends_at = self._patience_ends(offer, offer.address in standing)
            if ends_at > now:
                self._deadlines.set(key, ends_at)
            else:
                late.append(offer)
        return late

    def give_up(self, offer: Offer, now: float) -> HandoffFailed:
        """End an open offer for want of an answer."""
        self._close(offer)
        return HandoffFailed(offer.key, ErrorCode.HANDOFF_TIMEOUT, _too_late(offer, now))

    def next_event_at(self) -> float | None:
        """Return when a send or a deadline is due next; None when nothing is."""
        times = [lane.blocked_until_seconds for lane in self._lanes.values() if lane.waiting]
        times.append(self._deadlines.next_at())
        return min((at for at in times if at is not None), default=None)

    @property
    def n_open(self) -> int:
        """Offers without an outcome."""
        return len(self._offers)

    @property
    def flying_bytes(self) -> int:
        """Bytes that sockets hold or that are under way."""
        return sum(lane.flying_bytes for lane in self._lanes.values())

    def _answered(
        self, lane: _Lane, offer: Offer, answer: Answer, now: float
    ) -> HandoffDelivered | HandoffFailed | None:
        if answer.kind == AnswerKind.RECEIVED:
            if not offer.is_received and offer.key not in lane.waiting:
                offer.received_at_seconds = now
                lane.received[offer.key] = offer
                self._deadlines.drop(offer.key)
            return None
        self._close(offer)
        if answer.kind == AnswerKind.IMPORTED:
            return _delivered(offer, now)
        return HandoffFailed(offer.key, answer.error, answer.message, answer.is_over)

    def _patience_ends(self, offer: Offer, is_connected: bool) -> float:
        ends_at = self._silent_since(offer) + offer.deadline_seconds
        if not is_connected:
            return ends_at
        return ends_at + self._under_way(offer) / SLOWEST_BYTES_PER_SECOND

    def _silent_since(self, offer: Offer) -> float:
        return max(self._lanes[offer.address].heard_at_seconds, offer.offered_at_seconds)

    def _under_way(self, offer: Offer) -> int:
        """Return the bytes that decode has to take before it can answer this offer."""
        lane = self._lanes[offer.address]
        return lane.flying_bytes + (offer.kv_bytes if offer.key in lane.waiting else 0)

    def _close(self, offer: Offer) -> None:
        """Forget an offer; what is in the socket of it stays counted until it is confirmed."""
        del self._offers[offer.key]
        self._deadlines.drop(offer.key)
        lane = self._lanes[offer.address]
        lane.waiting.pop(offer.key, None)
        lane.received.pop(offer.key, None)
        self._tidy(offer.address)

    def _tidy(self, address: Address) -> None:
        lane = self._lanes.get(address)
        if lane is not None and lane.is_empty:
            del self._lanes[address]


def _delivered(offer: Offer, now: float) -> HandoffDelivered:
    """An import whose receipt was lost had at least arrived: all its time counts as transfer."""
    received = now if offer.received_at_seconds is None else offer.received_at_seconds
    started = offer.offered_at_seconds
    kv = offer.handoff.kv
    pulled = len(kv.blocks) if isinstance(kv, KvInPool) else 0
    seconds, transfer_seconds = now - started, received - started
    decode = offer.target.worker_id
    return HandoffDelivered(offer.key, seconds, offer.kv_bytes, transfer_seconds, pulled, decode)


def _too_late(offer: Offer, now: float) -> str:
    waited = now - offer.offered_at_seconds
    return (
        f"{offer.target.worker_id} never confirmed the handoff, {waited:.1f} s after it was "
        f"offered ({offer.sends} sends)"
    )
