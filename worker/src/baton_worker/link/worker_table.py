"""Every worker of one gateway process: which connection is whose, who is up, what gets through.

Owns the map from connections (ROUTER routing ids) to worker ends, replacement of a worker by a new
process under the same name, refusal and quarantine. Pure like the ends: messages to send wait in
`out` and in each end's `out`, and what consumers must know is returned as events.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from baton_worker.link import bounds
from baton_worker.link.admission import Door, Visitor
from baton_worker.link.api import (
    GatewayLinkEvent,
    StepMeta,
    StepReceived,
    StepsLost,
    WorkerDown,
    WorkerUp,
)
from baton_worker.link.gateway_end import GatewayEnd, GatewaySettings, LinkState
from baton_worker.link.inbox import Verdict
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.refusals import FLOOD, INCARNATION_TAKEN, QUARANTINED, label
from baton_worker.logs import Seldom
from baton_worker.messages import WorkerInfo
from baton_worker.records.columns import StepColumns
from baton_worker.records.control import Ack, Bye, Control, ErrorNotice, Hello, Resume, Who
from baton_worker.records.decode import decode_step
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import PREFIX, PREFIX_BYTES

log = logging.getLogger(__name__)

_REMEMBERED = 4096
_ASK_AGAIN_SECONDS = 0.3
_GOODBYE = "bye"
_FORGET_SECONDS = 600.0


class Outgoing(NamedTuple):
    """A control message for a connection that has no end."""

    route: bytes
    message: Control


class WorkerTable:
    """See the module. `lag_seconds` is the consumer's lag, which shrinks every credit.

    `expelled`: connections to end, because of what was said over them or whose they are.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        metrics: GatewayLinkMetrics,
        admit: Callable[[str, WorkerInfo], str] = lambda user_id, info: "",
    ) -> None:
        """Start empty.

        Args:
            settings, metrics: see their types.
            admit: returns why a worker with this authenticated key may not be who it says it is,
                or "".
        """
        self.lag_seconds = 0.0
        self.out: deque[Outgoing] = deque()
        self.expelled: deque[bytes] = deque()
        self.ends: dict[str, GatewayEnd] = {}
        self._routes: dict[bytes, GatewayEnd] = {}
        self._settings = settings
        self._metrics = metrics
        self._door = Door(admit)
        self._seldom = Seldom()
        self._asked: OrderedDict[bytes, float] = OrderedDict()

    @property
    def dead_after_seconds(self) -> float:
        """How long a worker may be silent."""
        return self._settings.dead_after_seconds

    def end_of(self, route: bytes) -> GatewayEnd | None:
        """Return whose connection this is."""
        return self._routes.get(route)

    def hello(self, route: bytes, user_id: str, hello: Hello, now: float) -> list[GatewayLinkEvent]:
        """Welcome a worker, or tell it why not.

        Raises:
            RecordError: FIELD_RANGE.
        """
        bounds.check(hello)
        visitor = self._door.judge(self.ends, self._routes.get(route), user_id, hello)
        info = visitor.info
        if info is None or visitor.reason:
            return self._reject(route, hello, visitor)
        events: list[GatewayLinkEvent] = []
        end = self.ends.get(info.worker_id)
        if end is not None and end.epoch != hello.epoch:
            events += self._retire(end, "replaced")
            end = None
        if end is None:
            end = GatewayEnd(hello, info, self._settings, now)
            self.ends[info.worker_id] = end
        return events + self._greet(end, route, user_id, hello, info, now)

    def malformed(self, route: bytes, error: RecordError, now: float) -> list[GatewayLinkEvent]:
        """Take note of bytes that are no message: too many of them, and the worker is shut out.

        A whole message with a number that nobody can have reached is worse: its sender lies, and
        its connection ends.
        """
        end = self._routes.get(route)
        if error.reason is RefusalReason.FIELD_RANGE:
            return self._expel(route, error.reason.value, str(error))
        if end is None or not end.note_refusal(now):
            return []
        return self._quarantine(end, error.reason.value)

    def flooded(self, route: bytes) -> list[GatewayLinkEvent]:
        """End a connection over which comes more than any worker has to say."""
        self._metrics.malformed_messages.inc(FLOOD)
        return self._expel(route, FLOOD, "more messages than any worker has to say")

    def review(self) -> list[GatewayLinkEvent]:
        """Turn away every worker that would not be let in now: its key was revoked or renamed."""
        events: list[GatewayLinkEvent] = []
        for end in list(self.ends.values()):
            reason = self._door.admit(end.user_id, end.info)
            if reason:
                self._turn_away(end.route, end.epoch, reason)
                self.expelled.append(end.route)
                events += self._retire(end, reason)
        return events

    def cut_off(self, route: bytes, now: float) -> None:
        """Note that a connection has ended.

        A process that dies leaves this as its only word; one that lives is back with the same epoch
        in a fraction of a second, and loses nothing by it. Nobody is told yet: the connection may
        have carried a BYE that has not been read.
        """
        end = self._routes.get(route)
        if end is None or end.is_cut_off:
            return
        end.cut_off(now + self._settings.reconnect_seconds, now)

    def abandon(self) -> list[GatewayLinkEvent]:
        """Take every worker down, because the link itself ends."""
        events: list[GatewayLinkEvent] = []
        for end in list(self.ends.values()):
            events += self._retire(end, "link_failed")
        return events

    def give_up(self, end: GatewayEnd, reason: str) -> list[GatewayLinkEvent]:
        """Take a worker down that this side cannot serve any more."""
        return self._retire(end, reason)

    def step(self, route: bytes, frame: memoryview, now: float) -> list[GatewayLinkEvent]:
        """Take one STEP frame. Raises what `hello` does."""
        end = self._routes.get(route)
        if end is None:
            self._ask(route, now)
            return []
        end.heard_at = now
        try:
            header, columns = decode_step(frame, end.limits)
        except RecordError as error:
            return self._refuse_bytes(end, frame, error, now)
        bounds.check_step(header)
        if header.epoch != end.epoch:
            self._metrics.stale_messages.inc()
            self._ask(route, now)
            return []
        bounds.check_let_out(header.seq, end.inbox.furthest)
        return self._take(end, header, columns, now)

    def control(self, route: bytes, message: Control, now: float) -> list[GatewayLinkEvent]:
        """Take any other message but HELLO. Raises what `hello` does."""
        bounds.check(message)
        end = self._routes.get(route)
        if end is None:
            self._ask(route, now)
            return []
        end.heard_at = now
        match message:
            case Ack():
                end.on_ack(message, now)
            case Resume():
                end.on_resume(message)
            case Bye() if message.epoch == end.epoch:
                return self._retire(end, _GOODBYE)
            case ErrorNotice() if message.epoch == end.epoch:
                return self._on_error(end, message)
            case _:
                self._metrics.stale_messages.inc()
        return []

    def tick(
        self, now: float, *, judge_silence: bool, judged: float | None = None
    ) -> list[GatewayLinkEvent]:
        """Acknowledge, keep alive, and declare silent and disconnected workers down.

        Who is late is judged by `judged`, which is before `now` where this process did not listen.
        `judge_silence` must be False while received messages still wait, that is unless all were
        read at some time in the last `LOOK_SECONDS`: a worker is not silent because this process
        was slow to read, and what one said before it died counts.
        """
        events: list[GatewayLinkEvent] = []
        for end in list(self.ends.values()):
            if end.standing is LinkState.UP:
                end.tick(self.lag_seconds, now)
                if judge_silence:
                    events += self._judge(end, now, now if judged is None else judged)
            elif now - end.heard_at > _FORGET_SECONDS:
                del self.ends[end.worker_id]
        return events

    def _judge(self, end: GatewayEnd, now: float, judged: float) -> list[GatewayLinkEvent]:
        if end.is_cut_read_out(now):
            self._tell_of_cut(end)
        if end.is_silent(judged):
            self._metrics.heartbeat_timeouts.inc()
            return self._take_down(end, "silent", LinkState.DOWN)
        if end.is_given_up(now, judged):
            return self._take_down(end, "disconnected", LinkState.DOWN)
        return []

    def _tell_of_cut(self, end: GatewayEnd) -> None:
        """Count and log, once, a connection that ended without a goodbye."""
        if end.is_cut_news:
            end.is_cut_news = False
            self._metrics.disconnects.inc()
            log.warning("worker disconnected", extra={"worker": end.worker_id})

    def _welcome_back(self, end: GatewayEnd) -> None:
        self._tell_of_cut(end)
        end.back_by = math.inf
        self._metrics.reconnects.inc()
        log.info("worker is back", extra={"worker": end.worker_id})

    def _greet(
        self,
        end: GatewayEnd,
        route: bytes,
        user_id: str,
        hello: Hello,
        info: WorkerInfo,
        now: float,
    ) -> list[GatewayLinkEvent]:
        events: list[GatewayLinkEvent] = []
        if end.is_cut_off and route != end.route:
            self._welcome_back(end)
        self._routes.pop(end.route, None)
        self._routes[route] = end
        end.route, end.user_id = route, user_id
        if end.standing is not LinkState.UP or end.info != info:
            events.append(WorkerUp(info.worker_id, end.epoch, info))
            end.standing = LinkState.UP
            end.set_info(info)
        lost = end.greet(hello, now)
        if lost:
            self._metrics.lost_frames.inc(lost.last_seq - lost.first_seq + 1)
            events.append(StepsLost(end.worker_id, end.epoch, *lost))
        end.welcome(self.lag_seconds, now)
        return events

    def _on_error(self, end: GatewayEnd, message: ErrorNotice) -> list[GatewayLinkEvent]:
        """The worker will not have this gateway: it holds another one of the same incarnation."""
        self._metrics.refusals.inc(label(message.reason))
        facts = {"worker": end.worker_id, "reason": message.reason}
        if message.reason != INCARNATION_TAKEN:
            log.warning("a worker refuses this gateway", extra=facts)
            return []
        before = self._settings.incarnation
        events = self._take_down(end, INCARNATION_TAKEN, LinkState.DOWN)
        if self._settings.identity.redraw():
            log.warning("incarnation taken, another drawn", extra=facts | {"was": before})
            for other in self.ends.values():
                if other.standing is LinkState.UP:
                    other.out.append(Who(self._settings.incarnation, 0))
        else:
            log.error("incarnation taken by another gateway", extra=facts | {"it": before})
        return events

    def _expel(self, route: bytes, reason: str, detail: str) -> list[GatewayLinkEvent]:
        end = self._routes.get(route)
        if self._seldom.is_due(f"{reason} of a {'worker' if end else 'stranger'}"):
            facts = {"worker": end.worker_id if end else "", "error": detail}
            log.warning("a connection is ended for what it said", extra=facts)
        self.expelled.append(route)
        if end is None:
            return []
        self._turn_away(route, end.epoch, reason)
        return self._retire(end, reason)

    def _reject(self, route: bytes, hello: Hello, visitor: Visitor) -> list[GatewayLinkEvent]:
        self._metrics.rejected_hellos.inc(visitor.reason)
        if self._seldom.is_due(visitor.reason):
            log.warning(
                "HELLO rejected", extra={"reason": visitor.reason, "detail": visitor.detail}
            )
        self._turn_away(route, hello.epoch, visitor.reason)
        if not visitor.is_expelled:
            return []
        self.expelled.append(route)
        end = self._routes.get(route)
        return self._retire(end, visitor.reason) if end else []

    def _turn_away(self, route: bytes, epoch: int, reason: str) -> None:
        """Tell a process, not one of its records, that it is refused."""
        self.out.append(Outgoing(route, ErrorNotice(epoch, 0, 0, 0, reason)))

    def _ask(self, route: bytes, now: float) -> None:
        self._metrics.unknown_routes.inc()
        if now - self._asked.get(route, float("-inf")) < _ASK_AGAIN_SECONDS:
            return
        self._asked[route] = now
        self._asked.move_to_end(route)
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        self.out.append(Outgoing(route, Who(self._settings.incarnation, 0)))

    def _take(
        self, end: GatewayEnd, header: StepHeader, columns: StepColumns, now: float
    ) -> list[GatewayLinkEvent]:
        verdict = end.inbox.offer(header.seq, now)
        if verdict is Verdict.DUPLICATE:
            self._metrics.duplicates.inc()
            return []
        if verdict is Verdict.GAP:
            self._metrics.gaps.inc()
            self._metrics.resumes.inc(end.ask_for_replay(now))
            return []
        reason = end.contradiction(header)
        if reason:
            return self._refuse(end, reason, now)
        n_ours = end.n_ours(columns)
        if n_ours == 0:
            self._metrics.foreign_rows.inc(columns.n_rows)
            end.inbox.skip(now)
            return []
        if n_ours < columns.n_rows:
            return self._refuse(end, "incarnation", now)
        end.inbox.accept(now)
        self._metrics.received_frames.inc()
        self._metrics.received_bytes.inc(header.frame_bytes)
        self._metrics.received_rows.inc(columns.n_rows)
        return [StepReceived(end.worker_id, StepMeta.of(header), columns)]

    def _refuse_bytes(
        self, end: GatewayEnd, frame: memoryview, error: RecordError, now: float
    ) -> list[GatewayLinkEvent]:
        seq = PREFIX.unpack_from(frame)[-1] if len(frame) >= PREFIX_BYTES else None
        # A connection delivers in order, so unless a replay is awaited, unreadable bytes are the
        # expected record. While one is awaited, only bytes that claim its number are.
        if seq != end.inbox.expected and end.inbox.is_waiting(now):
            self._metrics.refused_frames.inc(error.reason.value)
            return self.malformed(end.route, error, now)
        log.warning("record refused", extra={"worker": end.worker_id, "error": str(error)})
        return self._refuse(end, error.reason.value, now)

    def _refuse(self, end: GatewayEnd, reason: str, now: float) -> list[GatewayLinkEvent]:
        self._metrics.refused_frames.inc(reason)
        end.refuse(reason, now)
        return self._quarantine(end, reason) if end.note_refusal(now) else []

    def _quarantine(self, end: GatewayEnd, reason: str) -> list[GatewayLinkEvent]:
        self._metrics.quarantines.inc()
        self._turn_away(end.route, end.epoch, QUARANTINED)
        return self._take_down(end, f"quarantined: {reason}", LinkState.QUARANTINED)

    def _retire(self, end: GatewayEnd, reason: str) -> list[GatewayLinkEvent]:
        self._door.retire(end.epoch, reason)
        del self.ends[end.worker_id]
        return self._take_down(end, reason, LinkState.DOWN) if end.standing is LinkState.UP else []

    def _take_down(
        self, end: GatewayEnd, reason: str, standing: LinkState
    ) -> list[GatewayLinkEvent]:
        if reason != _GOODBYE:
            self._tell_of_cut(end)
        self._routes.pop(end.route, None)
        dropped = end.fall(standing)
        self._metrics.dropped_commands.inc("worker_down", dropped)
        self._metrics.workers_down.inc(reason.partition(":")[0])
        level = logging.INFO if reason == _GOODBYE else logging.WARNING
        log.log(level, "worker down", extra={"worker": end.worker_id, "reason": reason})
        return [WorkerDown(end.worker_id, end.epoch, reason)]
