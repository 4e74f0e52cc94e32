"""The sending half of the KV transport: asks for places and offers over connections to decode.

What is sent when is `asks`' and `offers`' decision; this moves bytes. Asks have connections of
their own, so that none waits behind another request's KV. Runs on the transport's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NamedTuple

import zmq

from baton_worker.engine.api import Handoff, KvFilled
from baton_worker.engine.closing import close_all
from baton_worker.handoff.api import HandoffEvent, HandoffFailed, HandoffGranted
from baton_worker.handoff.asks import AskBook
from baton_worker.handoff.dealers import Dealers, Socket
from baton_worker.handoff.frames import (
    Answer,
    HandoffFormatError,
    decode_answer,
    encode_ask,
    encode_filled,
    encode_offer,
)
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.nixl_visits import NixlVisits
from baton_worker.handoff.nixl_words import (
    NixlWordsError,
    decode_welcome,
    encode_introduction,
    is_welcome,
)
from baton_worker.handoff.offers import Address, Offer, OfferBook, address_of
from baton_worker.handoff.room import Wish
from baton_worker.identity import RequestKey
from baton_worker.link.contexts import Context
from baton_worker.link.multipart import Multipart
from baton_worker.link.sockets import Change
from baton_worker.listening import ListeningClock
from baton_worker.logs import Seldom
from baton_worker.messages import DecodeTarget

log = logging.getLogger(__name__)

TIDY_SECONDS = 10.0
_BATCH = 256


class Sends(NamedTuple):
    """How offers go out: at most `window_bytes` of KV unconfirmed to each decode worker; `pool_id`
    is what they know this process's KV pool by; `nixl` introduces it to who reads it so. Decode is
    late by `listening`.
    """

    listening: ListeningClock
    window_bytes: int
    pool_id: bytes = b""
    nixl: NixlVisits | None = None


class Sender:
    """See the module.

    Args:
        context: of connections to addresses.
        new_socket: returns an unconnected DEALER of a context, with the channel's options.
        sends: how offers go out.
        secure: prepares it for a peer's public key.
        make_calls: does what other threads have asked for since. Whoever cancels must see no event
            afterwards, so it is called before each.
        on_event: takes outcomes.
    """

    def __init__(
        self,
        metrics: HandoffMetrics,
        poller: zmq.Poller,
        context: Context,
        new_socket: Callable[[Context], Socket],
        secure: Callable[[Socket, str], None],
        *,
        sends: Sends,
        make_calls: Callable[[], None],
        on_event: Callable[[HandoffEvent], None],
    ) -> None:
        self._metrics = metrics
        self._listening = sends.listening
        self._make_calls = make_calls
        self._on_event = on_event
        self._pool_id = sends.pool_id
        self._nixl = sends.nixl
        self._offers = OfferBook(sends.window_bytes)
        metrics.open_offers.set_function(lambda: self._offers.n_open)
        self._asks = AskBook()
        self._carrying = Dealers(context, new_socket, secure, poller)
        self._asking = Dealers(context, new_socket, secure, poller)
        self._seldom = Seldom()
        self._tidied_at = sends.listening.seconds

    def ask(
        self, target: DecodeTarget, key: RequestKey, wish: Wish, deadline_seconds: float
    ) -> None:
        """See `KvTransport.ask`."""
        self._asks.open(target, key, wish, deadline_seconds, self._now())

    def offer(
        self, target: DecodeTarget, handoff: Handoff, deadline_seconds: float, now: float
    ) -> None:
        """See `KvTransport.offer`; `now` is when it was called, by the steady clock."""
        at = self._now() - max(time.monotonic() - now, 0.0)
        self._offers.open(target, handoff, deadline_seconds, at)

    def tell_filled(self, target: DecodeTarget, filled: KvFilled) -> None:
        """See `KvTransport.tell_filled`."""
        address = address_of(target)
        dealer = self._connected(self._carrying, address)
        if dealer is None or address not in self._carrying.standing():
            return
        try:
            dealer.send_multipart(encode_filled(filled, self._pool_id), zmq.NOBLOCK)
        except zmq.Again:
            self._metrics.send_blocked.inc()

    def cancel(self, key: RequestKey) -> None:
        """See `KvTransport.cancel`."""
        is_unanswered = self._offers.is_unanswered(key, self._now())
        was_idle = self._offers.is_idle(key, self._now())
        if self._offers.cancel(key):
            if is_unanswered:
                self._left_unanswered(key)
            elif was_idle:
                self._metrics.unimported()
            else:
                self._metrics.cancelled()

    def asked(self, key: RequestKey) -> tuple[DecodeTarget, Wish]:
        """Return who gave a place that was told just now, and what was asked."""
        return self._asks.asked(key)

    def leave(self, key: RequestKey) -> None:
        """See `KvTransport.leave`."""
        now = self._now()
        if self._asks.is_unanswered(key, now):
            self._left_unanswered(key)
        self._asks.leave(key, now)

    def due_seconds(self) -> float | None:
        """Return in how long something is due next; None when nothing is."""
        due = [
            (at, self._now()) for at in (self._offers.next_event_at(), self._asks.next_event_at())
        ]
        if self._nixl is not None:
            due.append((self._nixl.next_event_at(), time.monotonic()))
        return min((at - now for at, now in due if at is not None), default=None)

    def _now(self) -> float:
        """Return the time by which decode is timed: what stood still here is not its silence."""
        return self._listening.at(time.monotonic())

    def turn(self, ready: Container[Any]) -> None:
        """Read what came, then send and end what is due."""
        for address, answers in self._asking.readable(ready):
            self._receive(address, answers, self._asks, self._answered_ask)
        for address, answers in self._carrying.readable(ready):
            self._receive(address, answers, self._offers, partial(self._answered_offer, address))
        for address, change in self._asking.changes(ready):
            if change is Change.DOWN:
                self._asks.connection_lost(address, self._now())
                if self._nixl is not None:
                    self._nixl.lost(address)
        for address, change in self._carrying.changes(ready):
            if change is Change.DOWN:
                self._offers.connection_lost(address, self._now())
            else:
                self._offers.connected(address, self._now())
        if self._nixl is not None:
            self._introduce(self._nixl)
        self._say_asks()
        self._send_offers()
        self._end_overdue()
        self._close_unused()
        self._metrics.flying_bytes.set(self._offers.flying_bytes)

    def close(self) -> None:
        """Close every connection."""
        close_all([self._asking.close, self._carrying.close])

    def _left_unanswered(self, key: RequestKey) -> None:
        """Count and tell that decode was silent, which the request's end would hide."""
        self._metrics.unanswered()
        if self._seldom.is_due("unanswered"):
            log.warning("a request ended before decode had answered", extra={"key": key})

    def _introduce(self, nixl: NixlVisits) -> None:
        nixl.end_overdue(time.monotonic())
        for address in nixl.unsaid_at():
            dealer = self._connected(self._asking, address)
            if dealer is None or address not in self._asking.standing():
                continue
            try:
                dealer.send_multipart(encode_introduction(nixl.words), zmq.NOBLOCK)
            except zmq.Again:
                continue  # the connection is gone; the news of it is on its way
            nixl.said(address)

    def _say_asks(self) -> None:
        for address in self._asks.unsaid_at():
            dealer = self._connected(self._asking, address)
            if dealer is None or address not in self._asking.standing():
                continue
            while (message := self._asks.next_unsaid(address)) is not None:
                try:
                    dealer.send_multipart(encode_ask(message), zmq.NOBLOCK)
                except zmq.Again:
                    break  # the connection is gone; the news of it is on its way
                self._asks.said(message)

    def _send_offers(self) -> None:
        for address in self._offers.waiting_at():
            dealer = self._connected(self._carrying, address)
            if dealer is None or address not in self._carrying.standing():
                continue
            while (offer := self._offers.next_to_send(address, self._now())) is not None:
                self._make_calls()
                if self._offers.holds(offer) and not self._send(dealer, offer):
                    break

    def _connected(self, dealers: Dealers, address: Address) -> Socket | None:
        """Return the connection; None, and everything there failed, when it can never be made."""
        try:
            return dealers.to(address, self._now())
        except zmq.ZMQError as error:
            message = f"cannot send KV to {address.endpoint!r}: {error}"
            for failure in (
                *self._asks.fail(address, message),
                *self._offers.fail(address, message),
            ):
                self.fail(failure)
            return None

    def _send(self, dealer: Socket, offer: Offer) -> bool:
        try:
            dealer.send_multipart(
                encode_offer(offer.handoff, self._pool_id), zmq.NOBLOCK, copy=False
            )
        except zmq.Again:
            self._metrics.send_blocked.inc()
            self._offers.blocked(offer, self._now())
            return False
        self._offers.sent(offer)
        self._metrics.sent_bytes.inc(offer.kv_bytes)
        if offer.sends > 1:
            self._metrics.resent.inc()
            log.warning("handoff sent again", extra={"key": offer.key, "sends": offer.sends})
        return True

    def _end_overdue(self) -> None:
        now = self._listening.judged
        for failure in self._asks.overdue(now):
            self.fail(failure)
        for offer in self._offers.overdue(now, self._carrying.standing()):
            self._make_calls()
            if self._offers.holds(offer):
                self.fail(self._offers.give_up(offer, now))

    def _close_unused(self) -> None:
        now = self._now()
        if now - self._tidied_at >= TIDY_SECONDS:
            self._tidied_at = now
            introduced = frozenset() if self._nixl is None else self._nixl.addresses()
            self._asking.close_unused(now, self._asks.addresses() | introduced)
            self._carrying.close_unused(now, self._offers.addresses())

    def fail(self, failure: HandoffFailed) -> None:
        """Count and tell a failure."""
        self._metrics.failed(failure)
        self._on_event(failure)

    def _receive(
        self,
        address: Address,
        answers: Multipart,
        book: AskBook | OfferBook,
        apply: Callable[[Answer], None],
    ) -> None:
        for _ in range(_BATCH):
            try:
                frames = answers.take()
            except zmq.Again:
                return
            if not frames:
                continue
            buffers = [frame.buffer for frame in frames]
            try:
                if self._nixl is not None and is_welcome(buffers):
                    self._nixl.welcomed(address, decode_welcome(buffers), time.monotonic())
                    continue
                answer = decode_answer(buffers)
            except (HandoffFormatError, NixlWordsError) as error:
                self._metrics.malformed.inc()
                if self._seldom.is_due("malformed"):
                    facts = {"endpoint": address.endpoint, "error": str(error)}
                    log.warning("malformed answer", extra=facts)
                continue
            # Whoever cancels and then lets decode answer must see no event: what was called before
            # the answer came is done before it, however many answers are read in one go.
            self._make_calls()
            if book.is_for_another(answer.key, address):
                self._metrics.malformed.inc()
                if self._seldom.is_due("another's"):
                    facts = {"endpoint": address.endpoint, "key": str(answer.key)}
                    log.warning("answer to what another worker was told", extra=facts)
                continue
            apply(answer)

    def _answered_ask(self, answer: Answer) -> None:
        event = self._asks.answer(answer, self._now())
        if isinstance(event, HandoffGranted):
            self._metrics.places.granted_seconds.observe(event.seconds)
            self._on_event(event)
        elif event is not None:
            self.fail(event)

    def _answered_offer(self, address: Address, answer: Answer) -> None:
        event = self._offers.answer(address, answer, self._now())
        if event is not None:
            self._asks.forget(answer.key)
            self._metrics.outcome(event)
            self._on_event(event)
