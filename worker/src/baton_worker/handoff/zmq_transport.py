"""KvTransport over ZeroMQ: frames straight from the tensors, one thread, no copy on the way out.

One ROUTER takes offers; one DEALER per decode worker makes them (`dealers`). Only the transport's
thread touches sockets; calls reach it through a queue and a wake-up. A lost connection loses
messages, so offers are repeated until answered (`offers`) and receivers deduplicate (`ledger`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import zmq

from baton_worker.addresses import bindable
from baton_worker.config import ConfigError, HandoffConfig
from baton_worker.config_errors import cannot_listen
from baton_worker.engine.api import Handoff
from baton_worker.handoff.address import advertised, check_advertised
from baton_worker.handoff.api import HandoffArrived, HandoffEvent, HandoffFailed
from baton_worker.handoff.dealers import Dealers
from baton_worker.handoff.frames import (
    Answer,
    AnswerKind,
    HandoffFormatError,
    decode_answer,
    decode_offer,
    encode_answer,
    encode_offer,
)
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.offers import Address, Offer, OfferBook, address_of
from baton_worker.handoff.security import Security
from baton_worker.handoff.senders import Senders
from baton_worker.identity import RequestKey
from baton_worker.link.sockets import use_family_of
from baton_worker.link.wakeup import Wakeup
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_IDLE_POLL_SECONDS = 0.5
_MAX_FRAME_BYTES = 1 << 31
_MAX_ROUTES = 8192


class ZmqKvTransport:
    """See `handoff.api.KvTransport`."""

    def __init__(
        self,
        config: HandoffConfig,
        metrics: HandoffMetrics,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        security: Security,
        takes_offers: bool,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._context = context
        self._security = security
        self._on_event: Callable[[HandoffEvent], None] = lambda event: None
        self._calls: deque[Callable[[], None]] = deque()
        self._book = OfferBook(_RETRY_SECONDS)
        self._senders = Senders(security.refused, metrics.handshake_refused)
        self._routes: OrderedDict[RequestKey, bytes] = OrderedDict()
        self._poller = zmq.Poller()
        self._dealers = Dealers(partial(self._socket, zmq.DEALER), security.client, self._poller)
        self._closing = False
        self._router = self._bind() if takes_offers else None
        self._endpoint = self._bound_endpoint()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kv-transport", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where this process takes KV; empty when it takes none."""
        return self._endpoint

    def _bound_endpoint(self) -> str:
        if self._router is None:
            return ""
        return advertised(self._config, self._router.getsockopt_string(zmq.LAST_ENDPOINT))

    def start(self, on_event: Callable[[HandoffEvent], None]) -> None:
        """Begin to serve."""
        self._on_event = on_event
        self._thread.start()

    def offer(self, target: DecodeTarget, handoff: Handoff, deadline_seconds: float) -> None:
        """Send a handoff."""
        now = time.monotonic()
        self._call(partial(self._book.open, target, handoff, deadline_seconds, now))

    def cancel(self, key: RequestKey) -> None:
        """Forget an offer."""
        self._call(partial(self._book.cancel, key))

    def acknowledge(self, key: RequestKey) -> None:
        """Answer IMPORTED."""
        self._call(partial(self._answer, Answer(*key, AnswerKind.IMPORTED), forget=True))

    def refuse(self, key: RequestKey, code: ErrorCode, message: str) -> None:
        """Answer REFUSED."""
        self._metrics.refused(code)
        answer = Answer(*key, AnswerKind.REFUSED, int(code), message)
        self._call(partial(self._answer, answer, forget=True))

    def close(self) -> None:
        """End the thread and close every socket."""
        self._call(partial(setattr, self, "_closing", True))
        self._thread.join(timeout=5.0)
        self._security.close()

    def _call(self, action: Callable[[], None]) -> None:
        self._calls.append(action)
        self._wakeup.set()

    def _bind(self) -> zmq.Socket[bytes]:
        check_advertised(self._config)
        router = self._socket(zmq.ROUTER)
        endpoint = bindable(self._config.bind)
        use_family_of(router, endpoint)
        self._security.server(router)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.close()
            raise ConfigError(
                cannot_listen("handoff.bind", self._config.bind, error.errno)
            ) from error
        return router

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        socket.set(zmq.HEARTBEAT_IVL, 1000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 10_000)  # they also fire behind one very long message
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        socket.set(zmq.CONNECT_TIMEOUT, 1500)
        return socket

    def _run(self) -> None:
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        if self._router is not None:
            self._poller.register(self._router, zmq.POLLIN)
        try:
            while not self._closing:
                self._turn()
        finally:
            if self._router is not None:
                self._router.close()
            self._dealers.close()

    def _turn(self) -> None:
        wait = self._book.next_event_in(time.monotonic())
        wait = _IDLE_POLL_SECONDS if wait is None else min(wait, _IDLE_POLL_SECONDS)
        ready = dict(self._poller.poll(int(wait * 1000) + 1))
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        self._make_calls()
        if self._router is not None and self._router in ready:
            self._receive_offers(self._router)
        for address, dealer in self._dealers.readable(ready):
            self._receive_answers(address, dealer)
        for address in self._dealers.broken(ready):
            self._book.connection_lost(address, time.monotonic())
        self._senders.review(time.monotonic())
        self._keep_offers()

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _keep_offers(self) -> None:
        now = time.monotonic()
        for offer in self._book.due(now):
            if self._is_open(offer):
                self._send(offer)
        for offer in self._book.overdue(now):
            if self._is_open(offer):
                self._fail(self._book.give_up(offer))
        self._metrics.open_offers.set(self._book.n_open)

    def _is_open(self, offer: Offer) -> bool:
        """Whether nobody has cancelled it, not even while others were sent or given up."""
        self._make_calls()
        return self._book.holds(offer)

    def _send(self, offer: Offer) -> None:
        now = time.monotonic()
        try:
            address = address_of(offer.target)
            dealer = self._dealers.to(address, now, self._book.addresses())
            dealer.send_multipart(encode_offer(offer.handoff), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._metrics.send_blocked.inc()
            self._book.blocked(offer, now)
            return
        except zmq.ZMQError as error:
            self._book.cancel(offer.key)
            message = f"cannot send KV to {offer.target.kv_endpoint!r}: {error}"
            self._fail(HandoffFailed(offer.key, ErrorCode.HANDOFF_PEER_LOST, message))
            return
        self._book.sent(offer, now)
        self._metrics.sent_bytes.inc(offer.kv_bytes)
        if offer.sends > 1:
            self._metrics.resent.inc()
            log.warning("handoff sent again", extra={"key": offer.key, "sends": offer.sends})

    def _fail(self, failure: HandoffFailed) -> None:
        self._metrics.failed(failure.code)
        self._on_event(failure)

    def _receive_answers(self, address: Address, dealer: zmq.Socket[bytes]) -> None:
        while dealer.poll(0):
            try:
                answer = decode_answer(dealer.recv_multipart())
            except HandoffFormatError as error:
                self._metrics.malformed.inc()
                facts = {"endpoint": address.endpoint, "error": str(error)}
                log.warning("malformed answer", extra=facts)
                continue
            # Whoever cancels and then lets decode answer must see no event: what was called before
            # the answer came is done before it, however many answers are read in one go.
            self._make_calls()
            if self._book.is_for_another(answer.key, address):
                self._metrics.malformed.inc()
                facts = {"endpoint": address.endpoint, "key": str(answer.key)}
                log.warning("answer to an offer that was made to another worker", extra=facts)
                continue
            event = self._book.answer(answer, time.monotonic())
            if event is not None:
                self._metrics.outcome(event)
                self._on_event(event)

    def _receive_offers(self, router: zmq.Socket[bytes]) -> None:
        while router.poll(0):
            self._make_calls()  # answers do not wait for the end of a stream of offers
            route, *frames = router.recv_multipart(copy=False)
            if not self._senders.admit(route.bytes, frames[0] if frames else route):
                continue
            try:
                handoff = decode_offer([frame.buffer for frame in frames])
            except HandoffFormatError as error:
                self._metrics.malformed.inc()
                log.warning("malformed offer refused", extra={"error": str(error)})
                if error.key is not None:  # or prefill would offer it again until its deadline
                    self._routes[error.key] = route.bytes
                    self.refuse(error.key, ErrorCode.HANDOFF_REFUSED, str(error))
                continue
            key = RequestKey(handoff.state.handle, handoff.state.attempt)
            self._routes[key] = route.bytes
            self._routes.move_to_end(key)
            while len(self._routes) > _MAX_ROUTES:
                self._routes.popitem(last=False)
            received = sum(array.nbytes for array in handoff.kv)
            self._metrics.received_bytes.inc(received)
            self._answer(Answer(*key, AnswerKind.RECEIVED), forget=False)
            self._on_event(HandoffArrived(handoff, received))

    def _answer(self, answer: Answer, *, forget: bool) -> None:
        route = self._routes.pop(answer.key, None) if forget else self._routes.get(answer.key)
        if route is None or self._router is None:
            log.info("answer without a route", extra={"key": answer.key, "kind": answer.kind})
            return
        try:
            self._router.send_multipart([route, *encode_answer(answer)], zmq.NOBLOCK)
        except zmq.Again:
            # After a RECEIVED that is lost prefill offers again, after any other answer when this
            # connection, which takes no more, breaks.
            self._metrics.send_blocked.inc()
