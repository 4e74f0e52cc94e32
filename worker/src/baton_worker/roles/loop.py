"""The engine thread of a worker: takes events, steps the engine, sends results on their way.

One turn is: take what came from link and KV transport, let the engine step once, publish rows,
offer and acknowledge handoffs. Owns the engine, the ledger and the live requests, all on one
thread; how these end is `endings`' matter. Knows link and transport by their contracts only, no
socket, no HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_worker.engine.api import EngineRefusedError, Handoff, KvFilled, StepResult
from baton_worker.handoff.api import (
    HandoffArrived,
    HandoffDelivered,
    HandoffEvent,
    HandoffFailed,
    HandoffFilled,
    HandoffGranted,
    HandoffWithdrawn,
)
from baton_worker.handoff.ledger import OfferVerdict
from baton_worker.identity import RequestKey, incarnation_of
from baton_worker.link.api import CommandReceived, GatewayLost, GatewayUp, Pressure, RowsRefused
from baton_worker.messages import Abort, Command, Reserve, Submit
from baton_worker.records.columns import ErrorCode
from baton_worker.roles.endings import Endings
from baton_worker.roles.event_queue import (
    DraftCountRequested,
    DrainRequested,
    EventQueue,
    StopRequested,
    WorkerEvent,
)
from baton_worker.roles.metrics import Outcome
from baton_worker.roles.open_requests import OpenRequests
from baton_worker.roles.parts import LoopParts
from baton_worker.roles.placeless import Placeless

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.1


@dataclass(slots=True)
class WorkerLoop:
    """Runs one worker until it is told to stop."""

    parts: LoopParts
    inbox: EventQueue = field(default_factory=EventQueue)
    clock: Callable[[], float] = time.monotonic
    live: OpenRequests = field(default_factory=OpenRequests)
    is_draining: bool = False
    _stopping: bool = False
    _stop_reason: str | None = None
    placeless: Placeless = field(init=False)
    endings: Endings = field(init=False)

    def __post_init__(self) -> None:
        parts = self.parts
        self.placeless = Placeless(
            parts.engine, parts.transport, parts.ledger.capacity, parts.handoff_deadline_seconds
        )
        self.endings = Endings(parts, self.live, self.placeless, self.clock)
        parts.metrics.follow(self.live.__len__, lambda: parts.ledger.n_open)

    def run(self) -> None:
        """Turn until a StopRequested has been served."""
        while not self._stopping:
            self.turn(IDLE_SECONDS)
        self.parts.progress.rest()

    def turn(self, idle_seconds: float) -> None:
        """Serve queued events and step once; wait up to `idle_seconds` when there is no work."""
        has_served = self._serve_queued(0.0 if self.parts.engine.has_work() else idle_seconds)
        if self._stop_reason is None and self.parts.engine.has_work():
            self._deliver(self.parts.engine.step(self._serve_queued, self._tell_filled))
        elif has_served:
            self.parts.observe_load(self.parts.engine.load())
        if self._stop_reason is not None:
            self._stop(self._stop_reason)

    def _serve_queued(self, wait_seconds: float = 0.0) -> bool:
        """Serve what is queued, and what became due; False if nothing was queued.

        Also called by the engine between two overlapped steps, so that a request which came while
        one ran is in the next.
        """
        if wait_seconds:
            self.parts.progress.rest()
        events = self.inbox.take(wait_seconds)
        self.parts.progress.serving()
        for event in events:
            self._serve(event)
        self._end_overdue()
        self._relieve_pressure()
        return bool(events)

    def n_open(self) -> int:
        """Requests that still need this process: running, queued, or with KV not yet pulled."""
        return len(self.live) + self.parts.ledger.n_open

    def _serve(self, event: WorkerEvent) -> None:
        match event:
            case CommandReceived(_, command):
                self._obey(command)
            case GatewayUp(incarnation, endpoint):
                log.info("gateway linked", extra={"incarnation": incarnation, "at": endpoint})
            case GatewayLost(incarnation, reason):
                self._abandon(incarnation, reason)
            case RowsRefused():
                self.endings.rows_refused(event)
            case DrainRequested(is_wanted):
                self._set_draining(is_wanted)
            case DraftCountRequested(count):
                log.info("draft count set", extra={"num_speculative_tokens": count})
                self.parts.engine.set_num_speculative_tokens(count)
            case StopRequested(reason):
                self._stop_reason = reason
            case _:
                self._serve_handoff(event)

    def _serve_handoff(self, event: HandoffEvent) -> None:
        match event:
            case HandoffGranted(key):
                request = self.placeless.take(key)
                if request is not None:
                    self._begin(request, event.kv_stays)
            case HandoffArrived(handoff):
                self._take_over(handoff)
            case HandoffDelivered(key):
                self.parts.engine.release_handoff(key)
                self.endings.leave(key, Outcome.HANDED_OVER)
            case HandoffFailed():
                self._not_handed_over(event)
            case HandoffFilled(filled, n_tokens):
                self.parts.engine.pull_ahead(filled, n_tokens)
            case HandoffWithdrawn(key):
                self.parts.engine.drop_ahead(key)

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Reserve():
                self._reserve(command)
            case Abort(handle, attempt):
                self._abort(handle, attempt)

    def _submit(self, submit: Submit) -> None:
        key = submit.key
        if self.live.holds(key):
            return  # the link delivers once per epoch; a replay under a new epoch may repeat
        if not self._admits(key):
            return
        self.live.enter(key, submit.decode)
        hands_over = submit.decode is not None
        self.parts.traces.submitted(key, submit.traceparent, hands_over=hands_over)
        if not self.placeless.needs_place(submit):
            self._begin(submit)
        elif not self.placeless.ask(submit):
            message = f"{len(self.placeless)} requests wait for a place at decode"
            self.endings.end(key, ErrorCode.QUEUE_FULL, message)

    def _begin(self, request: Submit, kv_stays: bool = False) -> None:
        try:
            self.parts.engine.submit(request, kv_stays)
        except EngineRefusedError as refusal:
            self.endings.end(request.key, refusal.code, str(refusal))

    def _reserve(self, reserve: Reserve) -> None:
        """Keep a place for a handoff; one that comes although it was refused is turned away."""
        key = RequestKey(reserve.handle, reserve.attempt)
        if self.parts.ledger.knows(key):
            return  # its handoff was quicker
        if not self._admits(key):
            self.parts.ledger.refuse(key, self.clock())
            return
        if not self.parts.ledger.reserve(key, reserve.deadline_seconds, self.clock()):
            self.endings.end(key, ErrorCode.DECODE_FULL, "this decode worker has no place left")

    def _admits(self, key: RequestKey) -> bool:
        """Refuse when stopping or backed up.

        A draining worker still admits: what arrives was sent before its gateway knew, and a
        gateway that knows sends nothing more.
        """
        if self._stopping:
            self.endings.end(key, ErrorCode.DRAINING, "this worker takes no new requests")
            return False
        if self.parts.link.pressure(incarnation_of(key.handle)) >= Pressure.STOP_ADMITTING:
            self.endings.end(key, ErrorCode.QUEUE_FULL, "the link to this gateway is backed up")
            return False
        return True

    def _abort(self, handle: int, attempt: int) -> None:
        now = self.clock()
        for key in self.live.of_handle(handle, attempt):
            self.parts.transport.cancel(key)
            self.parts.engine.release_handoff(key)
            if self.parts.engine.abort(key):
                self.live.end(key)
            elif not self.live.is_ending(key):
                self.endings.leave(key, Outcome.ABORTED)
        for n in range(attempt + 1):
            key = RequestKey(handle, n)
            self.parts.ledger.abort(key, now)
            if not self.live.holds(key):
                self.parts.transport.leave(key, code=None)

    def _take_over(self, handoff: Handoff) -> None:
        key = handoff.state.key
        verdict = self.parts.ledger.arrive(key, self.clock())
        if verdict is OfferVerdict.ALREADY_IMPORTED:
            self.parts.transport.acknowledge(key)
            if not self.live.holds(key):
                self.parts.transport.leave(key)
        elif verdict is OfferVerdict.ABORTED:
            self.parts.transport.refuse(key, None, "the request is over")
        elif verdict is OfferVerdict.CLOSED:
            self.parts.transport.refuse(key, ErrorCode.HANDOFF_REFUSED, "the request is over")
        elif verdict is OfferVerdict.FULL:
            self.parts.transport.refuse(key, ErrorCode.DECODE_FULL, "no place left")
        elif verdict is OfferVerdict.ADMIT:
            self._admit(key, handoff)

    def _admit(self, key: RequestKey, handoff: Handoff) -> None:
        try:
            self.parts.engine.admit_handoff(handoff)
        except EngineRefusedError as refusal:
            self.parts.ledger.close(key, self.clock())
            self.parts.transport.refuse(key, refusal.code, str(refusal))
            return
        self.live.enter(key)
        self.parts.traces.arrived(key, handoff.state.traceparent)

    def _not_handed_over(self, failure: HandoffFailed) -> None:
        """End a request whose handoff failed, unless it has ended while that was on its way. What
        is over at decode is told as any other, for it may be over there alone (its gateway's link).
        """
        key = failure.key
        self.parts.engine.release_handoff(key)
        if self.live.holds(key) and not self.live.is_ending(key):
            self.endings.end(key, failure.code, failure.message, is_over=failure.is_over)

    def _abandon(self, incarnation: int, reason: str) -> None:
        """A gateway process is gone: nobody reads its rows, so free what its requests hold."""
        keys = self.live.of_incarnation(incarnation)
        reserved = self.parts.ledger.reserved_by(incarnation)
        facts = {"incarnation": incarnation, "reason": reason, "requests": len(keys)}
        log.warning("gateway lost", extra=facts)
        for key in (*keys, *reserved):
            self._abort(key.handle, key.attempt)

    def _end_overdue(self) -> None:
        """End what waited too long for its handoff, or for the engine to come to it."""
        for key in self.parts.ledger.expire(self.clock()):
            if self.live.holds(key):
                self.endings.fail(key, ErrorCode.DECODE_FULL, "it waited too long to be decoded")
            else:
                no_handoff = "no handoff came for this place"
                self.endings.end(key, ErrorCode.RESERVATION_EXPIRED, no_handoff)

    def _relieve_pressure(self) -> None:
        """Walk the ladder: pause a backed-up gateway's requests, end those of a stalled one."""
        levels = {i: self.parts.link.pressure(i) for i in self.live.incarnations()}
        paused = frozenset(i for i, level in levels.items() if level >= Pressure.PAUSE)
        self.parts.engine.set_paused(paused)
        for incarnation, level in levels.items():
            if level is Pressure.STALLED:
                for key in self.live.of_incarnation(incarnation):
                    self.endings.fail(key, ErrorCode.LINK_STALLED, "the gateway takes no records")

    def _deliver(self, result: StepResult) -> None:
        now = self.clock()
        for key in result.imported:
            self.parts.ledger.imported(key, now)
            self.parts.transport.acknowledge(key)
            self.parts.metrics.imported(key, now)
        self.parts.traces.first_tokens(result.stats.first_tokens)
        for failure in result.failed:
            self.endings.note_failure(failure)
        self.endings.publish(result.columns)
        for filled in result.filled:
            self._tell_filled(filled)
        for handoff in result.handoffs:
            key = handoff.state.key
            if target := self.live.target(key):
                self.parts.traces.offered(key)
                self.parts.transport.offer(target, handoff, self.parts.handoff_deadline_seconds)
            else:
                self.parts.engine.release_handoff(key)
        self.parts.observe(result.stats, self.parts.engine.load())

    def _tell_filled(self, filled: KvFilled) -> None:
        if target := self.live.target(filled.key):
            self.parts.transport.tell_filled(target, filled)

    def _set_draining(self, is_wanted: bool) -> None:
        if self.is_draining != is_wanted:
            self.is_draining = is_wanted
            what = "draining" if is_wanted else "draining no more"
            log.info(what, extra={"requests": self.n_open()})
            self.parts.on_draining(is_wanted)

    def _stop(self, reason: str) -> None:
        self._stopping = True
        self._set_draining(True)
        for key in self.live.all():
            self.endings.fail(key, ErrorCode.DRAINING, reason)
        while self.parts.engine.has_work() and len(self.live):
            self._deliver(self.parts.engine.step())
