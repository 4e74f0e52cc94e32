"""The worker's end of one link: a pure state machine between connection events and the ring.

Owns one epoch of step records towards one gateway address (`Outbox`), the commands coming back
(`Inbox`, whose epoch is the gateway's incarnation), and when to say HELLO, acknowledge or give up.
It reads no clock, touches no socket and takes no lock; control messages to send wait in `out`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from baton_worker.link import bounds
from baton_worker.link.api import GatewayLost, GatewayUp, Pressure
from baton_worker.link.claims import Claims
from baton_worker.link.end_types import CommandBytes, EndEvent, EndSettings, FrameRefused, State
from baton_worker.link.inbox import Inbox, Verdict
from baton_worker.link.metrics import WorkerLinkMetrics
from baton_worker.link.outbox import Entry, Outbox
from baton_worker.link.parts import StepPart
from baton_worker.link.refusals import INCARNATION_TAKEN, QUARANTINED, SHORT_LIVED, WHY, label
from baton_worker.messages import GatewayInfo
from baton_worker.records.control import (
    Ack,
    Bye,
    CommandFrame,
    Control,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
    Who,
)
from baton_worker.records.errors import RecordError, RefusalReason

__all__ = ["CommandBytes", "EndEvent", "EndSettings", "FrameRefused", "State", "WorkerEnd"]

log = logging.getLogger(__name__)


class WorkerEnd:
    """See the module. Every method that takes `now` may add to `out`.

    `refusal`: why the gateway does not welcome this worker, or it not the gateway; "" if they do.
    """

    def __init__(
        self,
        endpoint: str,
        settings: EndSettings,
        metrics: WorkerLinkMetrics,
        new_epoch: Callable[[], int],
        blank: Callable[[int, int], bytes],
        now: float,
        claims: Claims | None = None,
    ) -> None:
        """Start unconnected.

        Args:
            endpoint: the gateway's address, for events and logs.
            settings, metrics: see their types.
            new_epoch: returns a random u64.
            blank: returns an empty record for (epoch, seq), to stand in for a refused one.
            now: the current time.
            claims: whose incarnation is whose, for all ends of this worker.
        """
        self.endpoint = endpoint
        self.state = State.DOWN
        self.incarnation = 0
        self.refusal = ""
        self.info = b""
        self.out: deque[Control] = deque()
        self._claims = claims or Claims()
        self._settings = settings
        self._metrics = metrics
        self._new_epoch = new_epoch
        self._blank = blank
        self._heard_at = now
        self._acked_at = now
        self._hello_at = float("-inf")
        self._spoke_at = now
        self._hello_cursor = 1
        self._was_silent = False
        self._call_again_at = float("-inf")
        self._reset(now)

    def _reset(self, now: float) -> None:
        self.epoch = self._new_epoch()
        self.outbox: Outbox[StepPart] = Outbox(self._settings.limits, now)
        self.inbox = Inbox(self._settings.policy)

    def is_linked(self, now: float) -> bool:
        """Whether the gateway has welcomed this connection and is not silent."""
        return self.state is State.LINKED and not self._is_silent(now)

    def pressure(self, now: float) -> Pressure:
        """Return the rung of the ladder."""
        return self.outbox.pressure(now)

    def connected(self, now: float) -> None:
        """Greet over a new connection; nothing else is sent before the WELCOME."""
        self.outbox.revoke()
        self.out.clear()
        self.state = State.TURNED_AWAY
        if now >= self._call_again_at:
            self.state = State.CALLING
            self._say_hello(now)

    def disconnected(self) -> None:
        """Hold everything until the next connection."""
        self.state = State.DOWN
        self.outbox.revoke()
        self.out.clear()

    def announce(self, info: bytes, now: float) -> None:
        """Tell the gateway new facts about this worker (encoded `WorkerInfo`)."""
        self.info = info
        if self.state in (State.CALLING, State.LINKED):
            self._say_hello(now)

    def receive(self, message: Control, now: float) -> list[EndEvent]:
        """Take one decoded control message or command.

        Raises:
            RecordError: FIELD_RANGE; tell `malformed` of it.
        """
        bounds.check(message)
        if not isinstance(message, Who | Welcome) and not self._is_of_stream(message):
            self._metrics.stale_messages.inc()
            return []
        self._heard_at = now
        match message:
            case Welcome():
                return self._on_welcome(message, now)
            case Ack():
                self._on_ack(message, now)
            case Resume():
                self._on_resume(message, now)
            case Who():
                self._on_who(now)
            case CommandFrame():
                return self._on_command(message, now)
            case ErrorNotice():
                return self._on_error(message, now)
            case Bye():
                return self._on_bye(message, now)
            case _:
                self._metrics.stale_messages.inc()
        return []

    def malformed(self, error: RecordError, now: float) -> list[EndEvent] | None:
        """Take note of bytes that are no message; None unless the connection must be made anew.

        Of a whole message with a number that nobody can have reached the sender lies: nothing that
        it says counts any more.
        """
        self._metrics.malformed_messages.inc(error.reason.value)
        if error.reason is not RefusalReason.FIELD_RANGE:
            return None
        facts = {"endpoint": self.endpoint, "error": str(error)}
        log.warning("a connection is ended for what it said", extra=facts)
        events = self._turn_away(error.reason.value, now)
        self.disconnected()
        return events

    @property
    def dead_after_seconds(self) -> float:
        """How long a gateway may be silent and is linked."""
        return self._settings.dead_after_seconds

    def tick(self, now: float, judged: float | None = None) -> list[EndEvent]:
        """Do what time asks for: repeat a HELLO, acknowledge, keep alive, or give up.

        Whether the gateway is silent is judged by `judged`, which is before `now` where this
        process did not listen.
        """
        judged = now if judged is None else judged
        self._note_silence(judged)
        if self.incarnation and judged - self._heard_at >= self._settings.lost_seconds:
            return self.lose("silent", now)
        if self.state is State.CALLING and now - self._hello_at >= self._settings.hello_seconds:
            self._say_hello(now)
        elif self.state is State.TURNED_AWAY and now >= self._call_again_at:
            self.state = State.CALLING
            self._say_hello(now)
        elif self.state is State.LINKED:
            self._tick_linked(now)
        return []

    def lose(self, reason: str, now: float) -> list[EndEvent]:
        """Give the gateway up: drop its records and start over with a new epoch."""
        lost = self.incarnation
        self._claims.release(lost, self.endpoint)
        dropped = self.outbox.discard()
        self._metrics.discarded_frames.inc(len(dropped))
        self.incarnation = 0
        self._reset(now)
        if self.state is State.LINKED:
            self.state = State.CALLING
        log.warning(
            "gateway lost",
            extra={"endpoint": self.endpoint, "reason": reason, "dropped_frames": len(dropped)},
        )
        return [GatewayLost(lost, reason)] if lost else []

    def _on_bye(self, message: Bye, now: float) -> list[EndEvent]:
        """The gateway leaves; it waits for our answer, since a closed connection drops the news."""
        events = self.lose("bye", now)
        self.out.append(Bye(message.epoch, self.outbox.next_seq))
        return events

    def say_bye(self) -> None:
        """Tell the gateway that this worker is drained and leaves."""
        self.out.append(Bye(self.epoch, self.outbox.next_seq))

    def claim(self) -> Entry[StepPart] | None:
        """Return the next record to send, if the link is up and credit covers it."""
        return self.outbox.claim() if self.state is State.LINKED else None

    def _is_of_stream(self, message: Control) -> bool:
        if isinstance(message, CommandFrame | Bye):
            return message.epoch == self.incarnation
        return message.epoch == self.epoch

    def _is_silent(self, now: float) -> bool:
        return now - self._heard_at >= self._settings.dead_after_seconds

    def _note_silence(self, judged: float) -> None:
        """Count and log, once each time, that a gateway which was met is not heard any more.

        Whatever its connection is by then: libzmq's ping ends that of one that stands still in the
        same time, and may be first.
        """
        is_silent = bool(self.incarnation) and self._is_silent(judged)
        if is_silent and not self._was_silent:
            self._metrics.heartbeat_timeouts.inc()
            log.warning("gateway silent", extra={"endpoint": self.endpoint})
        self._was_silent = is_silent

    def _tick_linked(self, now: float) -> None:
        quiet = now - max(self._acked_at, self._hello_at) >= self._settings.hello_seconds
        if quiet and self.outbox.has_outstanding():
            self._say_hello(now)
        if self.inbox.is_ack_due(now) or (now - self._spoke_at >= self._settings.heartbeat_seconds):
            self._say_ack(now)

    def _say_hello(self, now: float) -> None:
        self._hello_at = self._spoke_at = now
        self._hello_cursor = self.outbox.cursor
        self.out.append(
            Hello(
                epoch=self.epoch,
                next_seq=self.outbox.next_seq,
                oldest_seq=self.outbox.oldest,
                commands_expected=self.inbox.expected,
                gateway_incarnation=self.incarnation,
                body=self.info,
            )
        )

    def _say_ack(self, now: float) -> None:
        self._spoke_at = now
        self.out.append(self.inbox.acknowledge(self.incarnation, self.outbox.next_seq))

    def _on_welcome(self, message: Welcome, now: float) -> list[EndEvent]:
        if message.epoch != self.epoch:
            self._metrics.stale_messages.inc()
            return []
        if message.expected_seq > self.outbox.next_seq:
            raise RecordError(
                RefusalReason.FIELD_RANGE,
                f"expected_seq is {message.expected_seq}, and {self.outbox.next_seq} is the next",
            )
        instance = _instance_of(message)
        if not self._claims.claim(message.gateway_incarnation, instance, self.endpoint):
            return self._refuse_gateway(message.gateway_incarnation, now)
        events = self._meet(message.gateway_incarnation, message.commands_oldest, now)
        self.state, self.refusal = State.LINKED, ""
        self._acked_at = now
        # WELCOME says what had arrived before the HELLO. Frames sent since then, on a connection
        # that stood, are on their way and need no replay.
        if message.expected_seq < self._hello_cursor:
            self.outbox.rewind(message.expected_seq)
        self.outbox.grant(message.credit_seq, message.credit_bytes)
        self._say_ack(now)
        return events

    def _meet(self, incarnation: int, commands_oldest: int, now: float) -> list[EndEvent]:
        if incarnation == self.incarnation:
            if self.inbox.jump(commands_oldest, now):
                self._metrics.command_gaps.inc()
            return []
        events: list[EndEvent] = []
        if self.incarnation:
            self._claims.release(self.incarnation, self.endpoint)
            events.append(GatewayLost(self.incarnation, "restarted"))
        self.incarnation = incarnation
        self.inbox = Inbox(self._settings.policy, max(1, commands_oldest))
        return [*events, GatewayUp(incarnation, self.endpoint)]

    def _on_ack(self, message: Ack, now: float) -> None:
        self._acked_at = now
        self.outbox.ack(message.ack_seq, now)
        if self.state is State.LINKED:
            self.outbox.grant(message.credit_seq, message.credit_bytes)

    def _on_resume(self, message: Resume, now: float) -> None:
        self._metrics.resumes.inc()
        if self.outbox.rewind(message.expected_seq):
            # The gateway learns what is gone from the `oldest` of a HELLO.
            self._say_hello(now)

    def _on_who(self, now: float) -> None:
        asked_already = now - self._hello_at < self._settings.hello_seconds
        if self.state is State.LINKED or (self.state is State.CALLING and not asked_already):
            self.state = State.CALLING
            self.outbox.revoke()
            self._say_hello(now)

    def _on_command(self, message: CommandFrame, now: float) -> list[EndEvent]:
        verdict = self.inbox.offer(message.seq, now)
        if verdict is Verdict.ACCEPT:
            # Handing over is applying: the caller's queue is as safe as this process.
            self.inbox.skip(now)
            return [CommandBytes(self.incarnation, message.body)]
        if verdict is Verdict.DUPLICATE:
            self._metrics.command_duplicates.inc()
        elif self.inbox.should_resume(now):
            self._metrics.command_gaps.inc()
            self.out.append(Resume(self.incarnation, self.outbox.next_seq, self.inbox.expected))
        return []

    def _on_error(self, message: ErrorNotice, now: float) -> list[EndEvent]:
        if message.first_seq == 0:
            return self._on_rejection(message.reason, now)
        refused = self.outbox.replace(message.first_seq, self._blank(self.epoch, message.first_seq))
        if refused is None:
            log.warning("error from gateway", extra={"endpoint": self.endpoint, "m": str(message)})
            return []
        return [FrameRefused(self.incarnation, refused.tag, message.reason)]

    def _on_rejection(self, reason: str, now: float) -> list[EndEvent]:
        """The gateway will not hear of this epoch again: start over, but not at once."""
        known = label(reason)
        self._metrics.rejections.inc(known)
        if known != self.refusal:
            facts = {"endpoint": self.endpoint, "reason": known, "why": WHY.get(known, reason)}
            log.error("the gateway refuses this worker", extra=facts)
        return self._turn_away(known, now)

    def _refuse_gateway(self, incarnation: int, now: float) -> list[EndEvent]:
        """Not be linked with a second gateway of one incarnation; it may draw another."""
        self._metrics.gateways_refused.inc(INCARNATION_TAKEN)
        facts = {"endpoint": self.endpoint, "incarnation": incarnation}
        log.error("another gateway has this incarnation: refused", extra=facts)
        self.out.append(ErrorNotice(self.epoch, self.outbox.next_seq, 0, 0, INCARNATION_TAKEN))
        return self._turn_away(INCARNATION_TAKEN, now)

    def _turn_away(self, reason: str, now: float) -> list[EndEvent]:
        """Start over, but not at once."""
        events = self.lose(reason, now)
        self.state, self.refusal = State.TURNED_AWAY, reason
        wait = self._settings.dead_after_seconds
        if reason == QUARANTINED:
            wait = self._settings.lost_seconds
        elif reason in SHORT_LIVED:
            wait = self._settings.heartbeat_seconds
        self._call_again_at = now + wait
        return events


def _instance_of(message: Welcome) -> str:
    """Return which process a WELCOME is from, "" for a gateway that does not say."""
    if not message.body:
        return ""
    try:
        return msgspec.msgpack.decode(message.body, type=GatewayInfo).instance
    except msgspec.DecodeError as error:
        raise RecordError(RefusalReason.FIELD_RANGE, f"WELCOME's body: {error}") from error
