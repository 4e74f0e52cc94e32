"""The receiving half of the KV transport: one ROUTER that hears asks and takes offers.

Who gets a place is `places`' decision; this moves bytes and remembers over which connection each
request spoke. Runs on the transport's thread, so that an ask is answered while the engine computes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq

from baton_worker.engine.api import Handoff, KvFilled, KvInPool
from baton_worker.handoff.api import (
    HandoffArrived,
    HandoffEvent,
    HandoffFailed,
    HandoffFilled,
    HandoffGranted,
    HandoffWithdrawn,
)
from baton_worker.handoff.frames import (
    MAX_OFFER_FRAMES,
    Answer,
    AnswerKind,
    Ask,
    HandoffFormatError,
    decode_ask,
    decode_filled,
    decode_offer,
    encode_answer,
    is_ask,
    is_filled,
)
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.nixl_words import (
    NixlWordsError,
    Welcome,
    decode_introduction,
    encode_welcome,
    is_introduction,
)
from baton_worker.handoff.peer_pools import PeerPools
from baton_worker.handoff.places import Places, Reply
from baton_worker.handoff.room import Wish
from baton_worker.handoff.senders import Senders
from baton_worker.handoff.shares import OWN
from baton_worker.identity import RequestKey
from baton_worker.link.multipart import Multipart
from baton_worker.link.sockets import Change, close, connection_events
from baton_worker.listening import ListeningClock
from baton_worker.logs import Seldom
from baton_worker.records.columns import ErrorCode

log = logging.getLogger(__name__)

_BATCH = 256
_SPARE_ROUTES = 1024
MOST_FRAMES = 1 + MAX_OFFER_FRAMES
"""Of a message, its route included."""


class Sockets(NamedTuple):
    """A bound ROUTER, and where its connection events arrive (`link.sockets.monitor`)."""

    router: zmq.Socket[bytes]
    monitoring: zmq.Socket[bytes]


class Receiver:
    """See the module.

    Args:
        listening: by which others are late.
        make_calls: does what other threads have asked for since, so that their answers do not wait
            for the end of a stream of offers.
        on_event: takes arrivals.
        pools: of prefill workers.
    """

    def __init__(
        self,
        metrics: HandoffMetrics,
        listening: ListeningClock,
        sockets: Sockets,
        places: Places,
        senders: Senders,
        make_calls: Callable[[], None],
        on_event: Callable[[HandoffEvent], None],
        pools: PeerPools,
    ) -> None:
        self._pools = pools
        self.router, self.monitoring = sockets
        self._messages = Multipart(self.router, MOST_FRAMES)
        self._metrics = metrics
        self._listening = listening
        self._places = places
        self._senders = senders
        self._seldom = Seldom()
        self._make_calls = make_calls
        self._on_event = on_event
        self._told_filled: set[RequestKey] = set()
        self._routes: OrderedDict[RequestKey, bytes] = OrderedDict()
        self._own_asked_at: dict[RequestKey, float] = {}  # own prompts that have no answer yet

    def receive(self) -> None:
        """Read what waits, up to a batch: what is due here must not wait for a talker's end."""
        for _ in range(_BATCH):
            self._make_calls()
            try:
                message = self._messages.take()
            except zmq.Again:
                return
            if not message:
                continue
            route, *frames = message
            is_endless = len(message) > MOST_FRAMES
            if not self._senders.knows(route.bytes):
                self.read_connections()  # of this one's beginning at the latest
            if not self._senders.admit(route.bytes, frames[0], time.monotonic(), is_endless):
                continue
            buffers = [frame.buffer for frame in frames]
            try:
                if is_ask(buffers):
                    self._asked(route.bytes, buffers)
                elif is_filled(buffers):
                    self._filled(route.bytes, buffers)
                elif is_introduction(buffers):
                    self._introduced(route.bytes, frames[0].get(zmq.SRCFD), buffers)
                else:
                    self._offered(route.bytes, buffers)
                self._senders.spoke(frames[0])
            except (HandoffFormatError, NixlWordsError) as error:
                self._metrics.malformed.inc()
                if self._seldom.is_due("malformed"):
                    log.warning("malformed message on the KV port", extra={"error": str(error)})
                key = error.key if isinstance(error, HandoffFormatError) else None
                if key is not None:  # prefill would wait for an answer until its deadline
                    self._keep_route(key, route.bytes)
                    self._turn_away(key, ErrorCode.HANDOFF_REFUSED, str(error))

    def read_connections(self) -> None:
        """Take what the monitor has to say."""
        for event in connection_events(self.monitoring):
            if event.change is Change.CAME:
                self._senders.came(event.fd, time.monotonic())
            elif event.change is Change.DOWN:
                self._senders.went(event.fd)
                if self._pools.nixl is not None:
                    self._pools.nixl.ended(event.fd)

    def _now(self) -> float:
        """Return the time by which places are timed: what stood still here is nobody's lateness."""
        return self._listening.at(time.monotonic())

    def close(self) -> None:
        """Close both sockets."""
        close(self.router)
        self.monitoring.close(linger=0)

    def review(self) -> None:
        """Drop who was in line, or did not come, for too long, and whose key was taken away."""
        self._senders.review(time.monotonic())
        for key in self._places.expire(self._listening.judged):
            self._metrics.places.expired.inc()
            self._forget_filled(key)
            log.warning("a place was never used", extra={"key": key})
            self._answer(_refusal(key, ErrorCode.DECODE_FULL, "no place became free in time"))
        self._grant()

    def acknowledge(self, key: RequestKey) -> None:
        """See `KvTransport.acknowledge`."""
        self._places.imported(key)
        self._told_filled.discard(key)
        self._answer(Answer(*key, AnswerKind.IMPORTED))
        self._routes.pop(key, None)
        self._grant()

    def refuse(self, key: RequestKey, code: ErrorCode | None, message: str) -> None:
        """See `KvTransport.refuse`."""
        self._metrics.refused(code)
        self._answer(_refusal(key, code, message))
        self.leave(key, code=code)

    def leave(self, key: RequestKey, *, code: ErrorCode | None = ErrorCode.HANDOFF_REFUSED) -> None:
        """See `KvTransport.leave`."""
        self._places.leave(key, code=code)
        self._forget_filled(key)
        self._routes.pop(key, None)
        self._own_asked_at.pop(key, None)
        self._grant()

    def ask_here(self, key: RequestKey, wish: Wish) -> None:
        """See `KvTransport.ask_here`; nobody is turned away for it."""
        self._own_asked_at[key] = time.monotonic()
        reply = self._places.ask(key, wish, self._now(), OWN)
        if reply is Reply.FULL:
            self._metrics.places.held_up("line")
            self._turn_away(key, ErrorCode.DECODE_FULL, "this decode worker's line is full")
        elif reply is Reply.OVER:
            self._turn_away_again(key)
        elif key not in self._grant():
            self._put_off(key, OWN)

    def _asked(self, route: bytes, frames: Sequence[Any]) -> None:
        ask = decode_ask(frames)
        if not isinstance(ask, Ask):
            self.leave(ask.key)
            return
        self._keep_route(ask.key, route)
        wish = Wish(ask.kv_bytes, ask.n_tokens, ask.priority, ask.turn)
        sender = self._senders.name_of(route)
        reply = self._places.ask(ask.key, wish, self._now(), sender)
        if reply is Reply.FULL and self._displace(sender):
            reply = self._places.ask(ask.key, wish, self._now(), sender)
        if reply is Reply.FULL:
            self._metrics.places.held_up("line")
            self._turn_away(ask.key, ErrorCode.DECODE_FULL, "this decode worker's line is full")
        elif reply is Reply.OVER:
            self._turn_away_again(ask.key)
        elif reply is Reply.GRANTED:
            self._answer(Answer(*ask.key, AnswerKind.GRANTED))
        elif ask.key not in self._grant():
            self._put_off(ask.key, sender)
            self._answer(Answer(*ask.key, AnswerKind.QUEUED))

    def _put_off(self, key: RequestKey, sender: str) -> None:
        why = self._places.why_waiting(key)
        self._metrics.places.held_up(why)
        if why == "share" and self._seldom.is_due("share"):
            log.warning("a sender has its share of places and wants more", extra={"sender": sender})

    def _displace(self, sender: str) -> bool:
        """Turn away the last of whoever fills the line; False if that is not another."""
        key = self._places.displace(sender)
        if key is None:
            return False
        self._metrics.places.held_up("displaced")
        if self._seldom.is_due("displaced"):
            filler = self._places.sender_of(key)
            log.warning("one sender fills the line for places", extra={"sender": filler})
        self._turn_away(key, ErrorCode.DECODE_FULL, "its sender fills this decode worker's line")
        return True

    def _offered(self, route: bytes, frames: Sequence[Any]) -> None:
        handoff = decode_offer(frames)
        state = handoff.state
        key = state.key
        self._keep_route(key, route)
        if isinstance(handoff.kv, KvInPool):
            pool = self._pools.find(handoff.kv.pool)
            if pool is None:
                message = "its KV lies in a pool that is not mapped here, or not any more"
                self._turn_away(key, ErrorCode.HANDOFF_REFUSED, message)
                return
            handoff = Handoff(state, dataclasses.replace(handoff.kv, pool=pool))
        received = handoff.sent_bytes
        self._metrics.received_bytes.inc(received)
        wish = Wish(received, state.n_cached, state.priority)
        reply = self._places.arrive(key, wish, self._senders.name_of(route))
        if reply is Reply.FULL:
            self._metrics.places.held_up("unasked")
            self._turn_away(key, ErrorCode.DECODE_FULL, "no room for KV that asked for no place")
            return
        self._on_event(HandoffArrived(handoff, received))  # first: a client waits for what follows
        self._answer(Answer(*key, AnswerKind.RECEIVED))
        self._set_gauges()

    def _filled(self, route: bytes, frames: Sequence[Any]) -> None:
        """Pass on what can be pulled of a request that has a place; of others it is too early."""
        key, kv, begun = decode_filled(frames)
        n_tokens = self._places.promised_tokens(key, self._senders.name_of(route))
        pool = self._pools.find(kv.pool)
        if not n_tokens:
            self._leave_word(key, "place")
        elif not 0 < len(kv.blocks) <= n_tokens:
            self._leave_word(key, "blocks")
        elif pool is None:
            self._leave_word(key, "pool")
        else:
            self._told_filled.add(key)
            filled = KvFilled(key, dataclasses.replace(kv, pool=pool), begun)
            self._on_event(HandoffFilled(filled, n_tokens))

    def _introduced(self, route: bytes, connection: int, frames: Sequence[Any]) -> None:
        """Get to know a pool that NIXL reads, and answer when that is done."""
        words = decode_introduction(frames)

        def tell(welcome: Welcome) -> None:
            try:
                self.router.send_multipart([route, *encode_welcome(welcome)], zmq.NOBLOCK)
            except zmq.Again:  # whoever is not there any more says it again over its next one
                self._metrics.send_blocked.inc()

        if self._pools.nixl is None:
            why_not = (
                "this decode worker's handoff.nixl is off, NIXL cannot be had there (see its log), "
                "or it has several ranks of a CPU"
            )
            tell(Welcome(words.pool_id, why_not))
        else:
            self._pools.nixl.introduced(words, connection, tell)

    def _leave_word(self, key: RequestKey, reason: str) -> None:
        self._metrics.pools.unheeded(reason)
        if self._seldom.is_due(f"unheeded {reason}"):
            log.info("filled KV is left until its offer", extra={"key": key, "why": reason})

    def _forget_filled(self, key: RequestKey) -> None:
        if key in self._told_filled:
            self._told_filled.discard(key)
            self._on_event(HandoffWithdrawn(key))

    def _turn_away_again(self, key: RequestKey) -> None:
        """Refuse what is over as what it ended by: nobody's failure only where it was aborted."""
        self._turn_away(key, self._places.refusal(key), "the request is over")

    def _turn_away(self, key: RequestKey, code: ErrorCode | None, message: str) -> None:
        """Refuse what came; its sender takes that for the end, so no place is kept for it."""
        self._metrics.refused(code)
        self._places.turn_away(key, code)
        self._forget_filled(key)
        self._answer(_refusal(key, code, message))
        self._routes.pop(key, None)

    def _grant(self) -> list[RequestKey]:
        granted = self._places.grant(self._now())
        self._set_gauges()
        for key in granted:
            self._answer(Answer(*key, AnswerKind.GRANTED))
        return granted

    def _set_gauges(self) -> None:
        self._metrics.places.waiting.set(self._places.n_waiting)
        self._metrics.places.taken.set(self._places.n_taken)
        self._metrics.places.awaited_bytes.set(self._places.awaited_bytes)

    def _keep_route(self, key: RequestKey, route: bytes) -> None:
        self._routes[key] = route
        self._routes.move_to_end(key)
        while len(self._routes) > self._places.most + _SPARE_ROUTES:
            self._routes.popitem(last=False)

    def _answer(self, answer: Answer) -> None:
        asked_at = self._own_asked_at.pop(answer.key, None)
        if asked_at is not None:
            self._tell_own(answer, time.monotonic() - asked_at)
            return
        route = self._routes.get(answer.key)
        if route is None:
            log.info("answer without a route", extra={"key": answer.key, "kind": answer.kind})
            return
        try:
            self.router.send_multipart([route, *encode_answer(answer)], zmq.NOBLOCK)
        except zmq.Again:
            # Whoever is not there any more hears it when it asks or offers again.
            self._metrics.send_blocked.inc()

    def _tell_own(self, answer: Answer, seconds: float) -> None:
        """Tell this process of what became of its own ask."""
        if answer.kind is AnswerKind.GRANTED:
            self._metrics.places.own_prompts.inc()
            self._on_event(HandoffGranted(answer.key, seconds))
        else:
            failed = HandoffFailed(answer.key, answer.error, answer.message, answer.is_over)
            self._on_event(failed)


def _refusal(key: RequestKey, code: ErrorCode | None, message: str) -> Answer:
    return Answer(*key, AnswerKind.REFUSED, int(code or 0), message)
