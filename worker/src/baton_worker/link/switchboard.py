"""Bytes between the gateway's ROUTER socket and its table of workers.

Owns the socket while it serves, which ends have something to send, and how much is read at once.
Everything here runs on the link's thread; nothing waits, but for the answers to a farewell.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import zmq

from baton_worker.identity import GatewayIdentity
from baton_worker.link.api import GatewayLinkEvent
from baton_worker.link.gateway_end import LOOK_SECONDS, GatewayEnd, LinkState
from baton_worker.link.hangup import Connection, hang_up, note
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.multipart import Multipart
from baton_worker.link.pace import Pace
from baton_worker.link.sockets import Change, Socket, close, connection_events, monitor
from baton_worker.link.strangers import Strangers
from baton_worker.link.worker_table import WorkerTable
from baton_worker.listening import ListeningClock
from baton_worker.logs import Seldom
from baton_worker.records.control import Bye, Control, Hello, decode_control, encode_control
from baton_worker.records.errors import RecordError
from baton_worker.records.layout import MessageType
from baton_worker.records.prefix import peek_type

log = logging.getLogger(__name__)

_BATCH = 512
_ACK_SECONDS = 0.02
_FROZEN_SECONDS = 1.0
_BYE_SECONDS = 0.5
_MOST_FRAMES = 8
"""Of a message that a later version might send; all that this one knows have two with the route."""
_LAST_WORDS_SECONDS = 0.2
_MOST_DEAF = 4096


class AppliedUpTo(NamedTuple):
    """A consumer's report: every record of `epoch` up to `seq` is applied."""

    epoch: int
    seq: int


class QueuedCommand(NamedTuple):
    """An encoded command and the worker process it is for."""

    end: GatewayEnd
    body: bytes


class Switchboard:
    """See the module."""

    def __init__(
        self,
        socket: Socket,
        table: WorkerTable,
        metrics: GatewayLinkMetrics,
        identity: GatewayIdentity,
    ) -> None:
        """Take over a bound socket."""
        self.monitoring = monitor(socket)
        self.wait_seconds = LOOK_SECONDS
        self._socket = socket
        self._messages = Multipart(socket, _MOST_FRAMES)
        self._table = table
        self._metrics = metrics
        self._identity = identity
        self._pace = Pace()
        self._seldom = Seldom()
        self._strangers = Strangers()
        self._active: set[GatewayEnd] = set()
        self._route_of_fd: dict[int, bytes] = {}
        self._connections: dict[bytes, Connection] = {}
        self._deaf: OrderedDict[bytes, None] = OrderedDict()
        self._hang_ups: deque[tuple[float, bytes]] = deque()
        self._ticked_at = 0.0
        self._drained_at = self._turned_at = time.monotonic()
        self._listening = ListeningClock(
            self._drained_at,
            most_seconds=_FROZEN_SECONDS,
            catch_up_seconds=table.dead_after_seconds,
        )

    def _listened(self) -> float:
        """Return the time by which workers are timed: what stood still here is nobody's silence."""
        return self._listening.at(time.monotonic())

    def read_connections(self) -> None:
        """Count failed handshakes, and tell the table whose connection ended."""
        for event in connection_events(self.monitoring):
            if event.change is Change.HANDSHAKE_FAILED:
                if self._seldom.is_due(event.reason):
                    log.warning("handshake failed", extra={"reason": event.reason})
                self._metrics.handshake_failures.inc(event.reason)
            elif event.change is Change.CAME:
                self._strangers.came(event.fd, time.monotonic())
            elif event.change is Change.DOWN:
                self._strangers.went(event.fd)
                route = self._route_of_fd.pop(event.fd, None)
                if route is not None:
                    self._connections.pop(route, None)
                    self._table.cut_off(route, self._listened())

    def receive(self) -> list[GatewayLinkEvent]:
        """Take the messages that have arrived, up to a batch."""
        events: list[GatewayLinkEvent] = []
        for _ in range(_BATCH):
            try:
                message = self._messages.take()
            except zmq.Again:
                self._drained_at = time.monotonic()
                break
            if message:
                events += self._take(message[0].bytes, message[1:])
        return events

    def apply(self, reports: Iterable[tuple[str, AppliedUpTo]]) -> None:
        """Note what consumers have applied; reports about replaced processes mean nothing."""
        now = self._listened()
        for worker_id, report in reports:
            end = self._table.ends.get(worker_id)
            if end is None or end.epoch != report.epoch:
                continue
            before = end.inbox.applied
            end.inbox.apply(report.seq, now)
            self._metrics.applied_frames.inc(end.inbox.applied - before)
            self._active.add(end)

    def command(self, queue: deque[QueuedCommand]) -> list[GatewayLinkEvent]:
        """Number the commands that wait, and send them with the next `flush`."""
        events: list[GatewayLinkEvent] = []
        now = self._listened()
        while queue:
            end, body = queue.popleft()
            if end.standing is not LinkState.UP:
                self._metrics.dropped_commands.inc("worker_down")
            elif end.command(body, now):
                self._active.add(end)
            else:
                self._metrics.dropped_commands.inc("ring_full")
                events += self._table.give_up(end, "commands_unread")
        return events

    def tick(self) -> list[GatewayLinkEvent]:
        """Acknowledge where it is due; look at every worker only once in a while."""
        now = time.monotonic()
        events: list[GatewayLinkEvent] = []
        # While it stands still connections may be cut, for our silence and not theirs.
        if self._listening.look(now):
            log.warning("link was not served", extra={"seconds": now - self._turned_at})
        self._turned_at = now
        self._hang_up(now)
        self._metrics.expelled.inc(self._strangers.review(now))
        if now - self._ticked_at >= self.wait_seconds:
            self._ticked_at = now
            drained = self._drained_at >= now - LOOK_SECONDS
            events = self._table.tick(
                self._listening.seconds, judge_silence=drained, judged=self._listening.judged
            )
            self._active.update(self._table.ends.values())
        for end in self._active:
            if end.standing is LinkState.UP:
                end.tick(self._table.lag_seconds, self._listening.seconds)
        return events

    def flush(self) -> None:
        """Send what ends and table have to say, then commands under credit."""
        while self._table.out:
            route, message = self._table.out.popleft()
            self._send(route, message)
        is_ack_due = False
        for end in self._active:
            if end.standing is LinkState.UP:
                self._flush_end(end)
                is_ack_due |= end.inbox.ack_due_at is not None
        self._active.clear()
        self.wait_seconds = _ACK_SECONDS if is_ack_due else LOOK_SECONDS

    def close(self) -> None:
        """Tell every worker that this process ends, wait shortly for their answers, and close.

        Without the wait the news may be lost: when a connection closes, libzmq drops what the
        worker's socket has received and not yet handed out (its option IMMEDIATE does that).
        """
        unanswered = set()
        for end in self._table.ends.values():
            if end.route and self._send(
                end.route, Bye(self._identity.incarnation, end.outbox.next_seq)
            ):
                unanswered.add(end.route)
        deadline = time.monotonic() + _BYE_SECONDS
        while unanswered and (left := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(1000 * left)):
                unanswered -= self._farewells()
        close(self._socket)
        self.monitoring.close(linger=0)

    def _farewells(self) -> set[bytes]:
        """Return who has said BYE; nothing else matters to a process that ends."""
        frames = self._messages.take()
        try:
            is_bye = len(frames) == 2 and peek_type(frames[1].buffer) is MessageType.BYE
        except RecordError:
            return set()
        return {frames[0].bytes} if is_bye else set()

    def _take(self, route: bytes, frames: Sequence[zmq.Frame]) -> list[GatewayLinkEvent]:
        now = time.monotonic()
        if route in self._deaf:
            self._metrics.stale_messages.inc()
            return []
        events: list[GatewayLinkEvent] = []
        if len(frames) == 1:
            events = self._understand(route, frames[0], self._listened())
        else:
            self._metrics.malformed_messages.inc("frames")
        # What the table had use for is bounded by credit.
        if len(frames) >= _MOST_FRAMES or (not events and self._pace.exceeded(route, now)):
            events = self._table.flooded(route)
        if route in self._table.expelled:
            self._note_connection(route, frames[0])
        end = self._table.end_of(route)
        if end is not None:
            self._active.add(end)
        return events

    def _understand(self, route: bytes, frame: zmq.Frame, now: float) -> list[GatewayLinkEvent]:
        try:
            if peek_type(frame.buffer) is MessageType.STEP:
                return self._table.step(route, frame.buffer, now)
            return self._take_control(route, frame, now)
        except RecordError as error:
            self._metrics.malformed_messages.inc(error.reason.value)
            return self._table.malformed(route, error, now)

    def _note_connection(self, route: bytes, frame: zmq.Frame) -> None:
        if route in self._connections:
            return
        connection = note(frame.get(zmq.SRCFD))
        if connection is not None:
            self._connections[route] = connection

    def _hang_up(self, now: float) -> None:
        """End connections that are not listened to any more, once they had time to hear why."""
        while self._table.expelled:
            route = self._table.expelled.popleft()
            self._hang_ups.append((now + _LAST_WORDS_SECONDS, route))
            self._deaf[route] = None
            if len(self._deaf) > _MOST_DEAF:
                self._deaf.popitem(last=False)
        while self._hang_ups and self._hang_ups[0][0] <= now:
            connection = self._connections.pop(self._hang_ups.popleft()[1], None)
            if connection is not None:
                self._metrics.expelled.inc(hang_up(connection))

    def _take_control(self, route: bytes, frame: zmq.Frame, now: float) -> list[GatewayLinkEvent]:
        message = decode_control(frame.buffer)
        if isinstance(message, Hello):
            # The end of the descriptor's last owner was told before this connection began: take it
            # in first, or it is taken for this one's.
            self.read_connections()
            fd = frame.get(zmq.SRCFD)
            end = self._table.end_of(route)
            if end is None or not end.is_cut_off:
                self._route_of_fd[fd] = route
                self._note_connection(route, frame)
            events = self._table.hello(route, _user_id(frame), message, now)
            if self._table.end_of(route) is not None:
                self._strangers.went(fd)
            return events
        return self._table.control(route, message, now)

    def _flush_end(self, end: GatewayEnd) -> None:
        while end.out:
            self._send(end.route, end.out.popleft())
        while True:
            command = end.next_command()
            if command is None or not self._send(end.route, command):
                return
            counter = self._metrics.resent_commands
            if not end.command_sent():
                counter = self._metrics.sent_commands
            counter.inc()

    def _send(self, route: bytes, message: Control) -> bool:
        """Send, or count that it could not be: whatever matters is said again later."""
        try:
            self._socket.send_multipart([route, encode_control(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._metrics.send_blocked.inc("queue_full")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._metrics.send_blocked.inc("unreachable")
            self._table.cut_off(route, self._listened())
        else:
            return True
        return False


def _user_id(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
