"""One gateway address as a worker sees it: a DEALER, its monitor, and the worker's end of the link.

Owns the socket and the lock between the engine thread, which pushes, and the link's thread, which
does everything else. No call waits: sends are non-blocking and the lock is held for microseconds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from baton_worker.link.api import Pressure
from baton_worker.link.metrics import WorkerLinkMetrics
from baton_worker.link.outbox import Entry, Push, Weight
from baton_worker.link.parts import (
    TAIL_LIMIT,
    FrameWriter,
    RowTag,
    StepPart,
    has_terminal,
    is_terminal,
    tag_of,
    weigh,
)
from baton_worker.link.refusals import HANDSHAKE_ENDED, NO_COMMON_MECHANISM, WHY
from baton_worker.link.sockets import (
    Change,
    ConnectionEvent,
    Socket,
    close,
    connection_events,
    monitor,
)
from baton_worker.link.worker_end import EndEvent, FrameRefused, State, WorkerEnd
from baton_worker.listening import ListeningClock
from baton_worker.logs import Seldom
from baton_worker.records.coalesce import split_rows
from baton_worker.records.columns import StepColumns
from baton_worker.records.control import decode_control, encode_control
from baton_worker.records.encode import restamp
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import Limits

log = logging.getLogger(__name__)

_BATCH = 256
_ONE_ROW = Limits(rows=1)
FROZEN_SECONDS = 1.0
"""A link that is not served for so long, by a thread that turns ten times a second, stood still."""
_WHY_NO_HANDSHAKE = {"protocol": NO_COMMON_MECHANISM}


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time as the peer needs it: monotonic seconds, and wall-clock nanoseconds for headers."""

    now: Callable[[], float]
    unix_ns: Callable[[], int]


class GatewayPeer:
    """See the module. `publish` and `pressure` are for any thread, the rest for the link's."""

    def __init__(
        self,
        end: WorkerEnd,
        writer: FrameWriter,
        socket: Socket,
        metrics: WorkerLinkMetrics,
        clocks: Clocks,
    ) -> None:
        """Monitor `socket`, then connect it to the end's address."""
        self.end = end
        self.socket = socket
        self.monitoring = monitor(socket)
        self._writer = writer
        self._metrics = metrics
        self._clocks = clocks
        self._lock = threading.Lock()
        self._is_overrun = False
        self._local: deque[EndEvent] = deque()
        self._seldom = Seldom(clocks.now)
        self._no_handshake = ""
        self._ticked_at = clocks.now()
        self._listening = ListeningClock(
            self._ticked_at, most_seconds=FROZEN_SECONDS, catch_up_seconds=end.dead_after_seconds
        )
        socket.connect(end.endpoint)

    def now(self) -> float:
        """Return the time by which this gateway is timed, and what waits for it: what stood still
        here is nobody's silence. Other threads than the link's hold the lock.
        """
        return self._listening.at(self._clocks.now())

    @property
    def is_linked(self) -> bool:
        """Whether the gateway has welcomed this connection and is not silent."""
        with self._lock:
            return self.end.is_linked(self.now())

    @property
    def refusal(self) -> str:
        """Why this gateway is not linked, as far as it is known; see `refusals`."""
        return self.end.refusal or self._no_handshake

    def publish(self, incarnation: int, columns: StepColumns, step_id: int) -> bool:
        """Queue rows, in pieces that fit a frame; False when that gateway is not here.

        Rows that the ring has no room for are refused: their requests are told to end. Rows that
        end a request may use the reserve; when even that is full, the whole link starts over.
        """
        weight = weigh(columns)
        pieces = [(columns, weight)]
        if not weight.within(TAIL_LIMIT):
            pieces = [(piece, weigh(piece)) for piece in split_rows(columns)]
        with self._lock:
            now = self.now()
            if self.end.incarnation != incarnation:
                return False
            for piece, weight in pieces:
                if not self._push(piece, weight, step_id, now):
                    self._overflow(piece, step_id, now)
        return True

    def pressure(self) -> Pressure:
        """Return the rung of the ladder."""
        with self._lock:
            # Since the link was last served nobody heard whether the gateway takes anything.
            return self.end.pressure(self._listening.judged)

    def read_connection(self) -> None:
        """Take what the monitor has to say."""
        for event in connection_events(self.monitoring):
            self._on_connection(event)

    def receive(self) -> list[EndEvent]:
        """Take the messages that have arrived, up to a batch."""
        events: list[EndEvent] = []
        for _ in range(_BATCH):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            with self._lock:
                try:
                    events += self.end.receive(decode_control(frame), self.now())
                except RecordError as error:
                    lost = self.end.malformed(error, self.now())
                    if lost is not None:
                        self._call_anew()
                        return events + lost
        return events

    def accuse(self, what: str) -> list[EndEvent]:
        """End the connection, because this gateway meddles with what is not its own."""
        with self._lock:
            error = RecordError(RefusalReason.FIELD_RANGE, what)
            lost = self.end.malformed(error, self.now()) or []
            self._call_anew()
        return lost

    def tick(self) -> list[EndEvent]:
        """Do what time asks for, and take over what `publish` could not settle."""
        now = self._clocks.now()
        with self._lock:
            if self._listening.look(now):
                facts = {"endpoint": self.end.endpoint, "seconds": now - self._ticked_at}
                log.warning("link was not served", extra=facts)
            self._ticked_at = now
            events = self.end.tick(self._listening.seconds, self._listening.judged)
            if self._is_overrun:
                self._is_overrun = False
                events += self.end.lose("ring_overrun", self._listening.seconds)
        while self._local:
            events.append(self._local.popleft())
        return events

    def flush(self) -> bool:
        """Send control messages, then records; False when the socket takes no more for now."""
        while self.end.out:
            if not self._send(encode_control(self.end.out[0])):
                return False
            self.end.out.popleft()
        for _ in range(_BATCH):
            with self._lock:
                entry = self.end.claim()
            if entry is None:
                break
            if not self._send_entry(entry):
                return False
        return True

    def has_more(self) -> bool:
        """Whether `flush` would send something now."""
        with self._lock:
            return bool(self.end.out) or self.end.claim() is not None

    def lose(self, reason: str) -> list[EndEvent]:
        """Give the gateway up."""
        with self._lock:
            return self.end.lose(reason, self.now())

    def is_drained(self) -> bool:
        """Whether nothing waits for an acknowledgement."""
        return len(self.end.outbox) == 0

    def announce(self, info: bytes) -> None:
        """Tell the gateway new facts about this worker."""
        with self._lock:
            self.end.announce(info, self.now())

    def say(self, message: Callable[[WorkerEnd], None]) -> None:
        """Change the end under the lock."""
        with self._lock:
            message(self.end)

    def close(self, linger_ms: int) -> None:
        """Close both sockets."""
        close(self.socket, linger_ms)
        self.monitoring.close(linger=0)

    def _call_anew(self) -> None:
        """End the connection and what it still carries; libzmq makes another."""
        self._metrics.expelled.inc()
        self.socket.disconnect(self.end.endpoint)
        self.socket.connect(self.end.endpoint)

    def _push(self, piece: StepColumns, weight: Weight, step_id: int, now: float) -> bool:
        outbox, group = self.end.outbox, self.end.incarnation
        part = StepPart(piece, step_id)
        pushed = outbox.push(part, weight, now, group=group)
        if pushed is Push.REFUSED and is_terminal(piece):
            pushed = outbox.push(part, weight, now, group=group, terminal=True)
        if pushed is Push.COALESCED:
            self._metrics.coalesced_steps.inc()
        return pushed is not Push.REFUSED

    def _overflow(self, piece: StepColumns, step_id: int, now: float) -> None:
        # Only rows that end a request are worth taking the piece apart for: it is slow.
        rows = split_rows(piece, limits=_ONE_ROW) if has_terminal(piece) else [piece]
        refused: list[StepPart] = []
        for row in rows:
            if not is_terminal(row):
                refused.append(StepPart(row, step_id))
            elif not self._push(row, weigh(row), step_id, now):
                self._is_overrun = True
                self._metrics.dropped_rows.inc("ring_overrun")
        if refused:
            n_rows = sum(part.columns.n_rows for part in refused)
            self._metrics.dropped_rows.inc("ring_full", n_rows)
            self._local.append(FrameRefused(self.end.incarnation, tag_of(refused), "ring_full"))

    def _on_connection(self, event: ConnectionEvent) -> None:
        if event.change is Change.HANDSHAKE_FAILED:
            self._metrics.handshake_failures.inc(event.reason)
            self._no_handshake = _WHY_NO_HANDSHAKE.get(event.reason, HANDSHAKE_ENDED)
            if self._seldom.is_due(self._no_handshake):
                why = WHY[self._no_handshake]
                facts = {"endpoint": self.end.endpoint, "reason": event.reason, "why": why}
                log.warning("handshake failed", extra=facts)
            return
        with self._lock:
            if event.change is Change.UP:
                self._no_handshake = ""
                self._metrics.connects.inc()
                self.end.connected(self.now())
            elif self.end.state is not State.DOWN:
                self.end.disconnected()
                self._metrics.disconnects.inc()

    def _send(self, frame: bytes) -> bool:
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_entry(self, entry: Entry[StepPart]) -> bool:
        frame = entry.frame or self._seal(entry)
        is_replay = entry.n_sends > 0
        if not self._send(restamp(frame, seq=entry.seq, is_replayed=True) if is_replay else frame):
            return False
        with self._lock:
            self.end.outbox.sent(entry)
        (self._metrics.resent_frames if is_replay else self._metrics.sent_frames).inc()
        self._metrics.sent_bytes.inc(len(frame))
        return True

    def _without_bad_rows(
        self, entry: Entry[StepPart], error: RecordError
    ) -> tuple[bytes, RowTag | None]:
        """Return the frame of those requests whose rows are fit for one; the others are told."""
        everything: RowTag | None = tag_of(entry.parts)
        epoch, now = self.end.epoch, self._clocks.unix_ns()
        try:
            sorted_out = self._writer.sort_out(entry.parts)
            good, bad = sorted_out.good, sorted_out.bad
            frame = self._writer.write(good, epoch, entry.seq, now) if good else None
            faults = {str(key): str(fault) for key, fault in sorted_out.faults.items()}
        except RecordError:
            good, bad, frame, faults = [], everything, None, {}
        if bad is None:  # each row alone is fine, all together are not
            good, bad, frame = [], everything, None
        assert bad is not None, "a frame that was refused has rows"
        log.error(
            "rows that no record can carry",
            extra={"step": entry.parts[0].step_id, "error": str(error), "requests": faults},
        )
        self._metrics.dropped_rows.inc("unwritable", len(bad.handle))
        self._local.append(FrameRefused(self.end.incarnation, bad, error.reason.value))
        if frame is None:
            return self._writer.blank(epoch, entry.seq), None
        return frame, tag_of(good)

    def _seal(self, entry: Entry[StepPart]) -> bytes:
        tag: RowTag | None = tag_of(entry.parts)
        epoch = self.end.epoch
        try:
            frame = self._writer.write(entry.parts, epoch, entry.seq, self._clocks.unix_ns())
        except RecordError as error:
            frame, tag = self._without_bad_rows(entry, error)
        with self._lock:
            self.end.outbox.seal(entry, frame, tag)
        return frame
