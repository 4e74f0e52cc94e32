"""WorkerLink over ZeroMQ: one thread, one DEALER per gateway.

Owns the thread, the set of gateways, and the way from a gateway's incarnation to its peer. The
protocol is `worker_end`'s, each socket is a `peer`'s.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from baton_worker.config import LinkConfig
from baton_worker.identity import RequestKey, Role, incarnation_of
from baton_worker.link.api import (
    CommandReceived,
    GatewayLost,
    GatewayUp,
    Pressure,
    RowsRefused,
    WorkerLinkEvent,
)
from baton_worker.link.claims import Claims
from baton_worker.link.contexts import Contexts
from baton_worker.link.curve import client_options, load_identity
from baton_worker.link.endpoints import (
    RESOLVE_SECONDS,
    Resolver,
    over_ipv6,
    static_endpoints,
)
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import WorkerLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.parts import TAIL_LIMIT, FrameWriter, RowTag
from baton_worker.link.peer import Clocks, GatewayPeer
from baton_worker.link.refusals import OTHER
from baton_worker.link.sockets import Socket, dealer, is_ipv6_endpoint
from baton_worker.link.wakeup import Wakeup
from baton_worker.link.worker_end import (
    CommandBytes,
    EndEvent,
    EndSettings,
    FrameRefused,
    WorkerEnd,
)
from baton_worker.messages import Command, WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import StepColumns
from baton_worker.records.errors import RefusalReason
from baton_worker.records.layout import Limits

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_ACK_TICK_SECONDS = 0.02
_BYE_LINGER_MS = 200
_JOIN_SECONDS = 5.0
_RECORD_REFUSALS = frozenset(RefusalReason) | {"semantic_hash", "incarnation", "ring_full"}


class ZmqWorkerLink:
    """See `api.WorkerLink`."""

    def __init__(
        self,
        config: LinkConfig,
        info: WorkerInfo,
        metrics: MetricFactory,
        *,
        dp_rank: int = 0,
        resolve_seconds: float = RESOLVE_SECONDS,
    ) -> None:
        """Check the configuration; nothing is opened before `start`.

        Args:
            config: addresses, bounds, times, keys.
            info: what HELLO says; its role and semantic hash go into every record.
            metrics: where the link counts.
            dp_rank: data-parallel rank of this sender.
            resolve_seconds: how often `config.dns` is looked up.

        Raises:
            ConfigError: no or bad addresses, or bad key files.
        """
        self._config = config
        self._static = static_endpoints(config)
        self._over_ipv6 = over_ipv6(self._static)
        self._identity = load_identity(config.curve, is_client=True)
        self._metrics = WorkerLinkMetrics(metrics)
        self._writer = FrameWriter(
            Role(info.role), info.semantic_hash, dp_rank, Limits(vocab_size=info.vocab_size)
        )
        self._info = msgspec.msgpack.encode(info)
        self._settings = _end_settings(config)
        self._clocks = Clocks(time.monotonic, time.time_ns)
        self._command_decoder = msgspec.msgpack.Decoder(Command)
        self._claims = Claims()
        self._peers: dict[str, GatewayPeer] = {}
        self._by_incarnation: dict[int, GatewayPeer] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._on_event: Callable[[WorkerLinkEvent], None] = lambda event: None
        self._wanted: frozenset[str] = frozenset(self._static)
        self._drain_until: float | None = None
        self._gauges_at = 0.0
        self._thread = threading.Thread(target=self._run, name="baton-link", daemon=True)
        self._resolver = (
            Resolver(config.dns, config.port, self._on_resolved, resolve_seconds)
            if config.dns
            else None
        )

    def start(self, on_event: Callable[[WorkerLinkEvent], None]) -> None:
        """See `api.WorkerLink.start`."""
        self._on_event = on_event
        self._thread.start()
        if self._resolver:
            self._resolver.start()

    def publish(self, incarnation: int, columns: StepColumns, step_id: int) -> None:
        """See `api.WorkerLink.publish`."""
        peer = self._by_incarnation.get(incarnation)
        if peer is None or not peer.publish(incarnation, columns, step_id):
            self._metrics.dropped_rows.inc("unknown_gateway", columns.n_rows)
            return
        self._metrics.sent_rows.inc(columns.n_rows)
        self._wakeup.set()

    def pressure(self, incarnation: int) -> Pressure:
        """See `api.WorkerLink.pressure`; a gateway that is not here takes nothing: STALLED."""
        peer = self._by_incarnation.get(incarnation)
        return peer.pressure() if peer else Pressure.STALLED

    def set_info(self, info: WorkerInfo) -> None:
        """See `api.WorkerLink.set_info`."""
        body = msgspec.msgpack.encode(info)
        self._call(lambda: self._announce(body))

    def known_gateways(self) -> int:
        """See `api.WorkerLink.known_gateways`."""
        return len(self._wanted)

    def linked_gateways(self) -> int:
        """See `api.WorkerLink.linked_gateways`; 0 once the link's thread has ended."""
        if not self._thread.is_alive():
            return 0
        return sum(peer.is_linked for peer in tuple(self._peers.values()))

    def refusals(self) -> dict[str, str]:
        """See `api.WorkerLink.refusals`."""
        peers = tuple(self._peers.items())
        return {endpoint: peer.refusal for endpoint, peer in peers if peer.refusal}

    def close(self, drain_seconds: float) -> None:
        """See `api.WorkerLink.close`."""
        if self._resolver:
            self._resolver.close()
        if not self._thread.is_alive():
            return
        self._call(lambda: self._begin_drain(drain_seconds))
        self._thread.join(drain_seconds + _JOIN_SECONDS)

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wakeup.set()

    def _on_resolved(self, endpoints: frozenset[str]) -> None:
        def want() -> None:
            self._wanted = endpoints

        self._call(want)

    def _announce(self, body: bytes) -> None:
        self._info = body
        for peer in self._peers.values():
            peer.announce(body)

    def _begin_drain(self, seconds: float) -> None:
        self._drain_until = self._clocks.now() + seconds

    def _run(self) -> None:
        context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        contexts = Contexts(context)
        try:
            while not self._is_done():
                self._meet_wanted(contexts)
                ready = self._wait()
                while self._calls:
                    self._calls.popleft()()
                self._turn(ready)
            self._by_incarnation = {}
            self._say_bye()
        finally:
            # A defect says no goodbye: to gateways this process is to look as dead as it is.
            for peer in self._peers.values():
                peer.close(_BYE_LINGER_MS)
            contexts.close(_BYE_LINGER_MS / 1000)
            context.term()

    def _wait(self) -> set[object]:
        """Sleep until there is something to do; returns the sockets that have messages."""
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        timeout = _TICK_SECONDS
        for peer in self._peers.values():
            blocked = peer.has_more()
            poller.register(peer.socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
            poller.register(peer.monitoring, zmq.POLLIN)
            if peer.end.inbox.ack_due_at is not None:
                timeout = _ACK_TICK_SECONDS
        ready = {source for source, what in poller.poll(int(1000 * timeout)) if what & zmq.POLLIN}
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        return ready

    def _turn(self, ready: set[object]) -> None:
        for peer in tuple(self._peers.values()):
            # What a connection carried comes before the news that it is gone, or a BYE is lost.
            if peer.socket in ready or peer.monitoring in ready:
                self._tell(peer, peer.receive())
            if peer.monitoring in ready:
                peer.read_connection()
            self._tell(peer, peer.tick())
            peer.flush()
        now = self._clocks.now()
        if now - self._gauges_at >= 1.0:
            self._gauges_at = now
            self._set_gauges()

    def _tell(self, peer: GatewayPeer, events: list[EndEvent]) -> None:
        for event in events:
            match event:
                case GatewayUp(incarnation):
                    self._by_incarnation = {**self._by_incarnation, incarnation: peer}
                    self._on_event(event)
                case GatewayLost(incarnation):
                    known = self._by_incarnation
                    self._by_incarnation = {i: p for i, p in known.items() if i != incarnation}
                    self._on_event(event)
                case CommandBytes():
                    self._tell_command(peer, event)
                case FrameRefused(incarnation, RowTag() as tag, reason):
                    self._metrics.refused_frames.inc(_refusal_label(reason))
                    self._on_event(RowsRefused(incarnation, tag.requests(), reason, tag.ended()))
                case FrameRefused():
                    log.warning("an empty record was refused", extra={"reason": event.reason})

    def _tell_command(self, peer: GatewayPeer, event: CommandBytes) -> None:
        try:
            command = self._command_decoder.decode(event.payload)
        except msgspec.DecodeError:
            # The gateway's request times out there; this end can only say so.
            log.exception("command not understood", extra={"incarnation": event.incarnation})
            self._metrics.malformed_messages.inc("command_body")
            return
        key = RequestKey(command.handle, command.attempt)
        if not key.fits_the_wire:
            # No row could answer it, and no record carry a row that did.
            log.error("command for a request that no record can name", extra={"key": key})
            self._metrics.malformed_messages.inc("command_body")
            return
        if incarnation_of(command.handle) != event.incarnation:
            # Another gateway's request: whoever sends this would end or replace it.
            self._tell(peer, peer.accuse(f"handle 0x{command.handle:x} is another gateway's"))
            return
        self._metrics.commands.inc()
        self._on_event(CommandReceived(event.incarnation, command))

    def _meet_wanted(self, contexts: Contexts) -> None:
        for endpoint in self._wanted - self._peers.keys():
            self._peers = {**self._peers, endpoint: self._new_peer(contexts, endpoint)}
        for endpoint in self._peers.keys() - self._wanted:
            peer = self._peers[endpoint]
            # A gateway that left the name but still answers is draining: let it.
            if not peer.is_linked:
                self._tell(peer, peer.lose("unlisted"))
                peer.close(0)
                contexts.leave(endpoint)
                self._peers = {e: p for e, p in self._peers.items() if e != endpoint}

    def _new_peer(self, contexts: Contexts, endpoint: str) -> GatewayPeer:
        config = self._config
        socket = dealer(contexts.of(endpoint), config.heartbeat_seconds, config.dead_after_seconds)
        socket.ipv6 = endpoint in self._over_ipv6 or is_ipv6_endpoint(endpoint)
        if self._identity:
            client_options(socket, self._identity, self._identity.gateway_key)
        end = WorkerEnd(
            endpoint,
            self._settings,
            self._metrics,
            lambda: secrets.randbits(64),
            self._writer.blank,
            self._clocks.now(),
            self._claims,
        )
        end.info = self._info
        return GatewayPeer(end, self._writer, socket, self._metrics, self._clocks)

    def _is_done(self) -> bool:
        if self._drain_until is None:
            return False
        drained = all(peer.is_drained() for peer in self._peers.values())
        return drained or self._clocks.now() >= self._drain_until

    def _say_bye(self) -> None:
        for peer in self._peers.values():
            left = len(peer.end.outbox)
            if left:
                self._metrics.discarded_frames.inc(left)
                log.warning(
                    "closed with unacknowledged records",
                    extra={"endpoint": peer.end.endpoint, "frames": left},
                )
            peer.say(lambda end: end.say_bye())
            peer.flush()

    def _set_gauges(self) -> None:
        peers = self._peers.values()
        boxes = [peer.end.outbox for peer in peers]
        ages = [peer.end.outbox.oldest_age_seconds(peer.now()) for peer in peers]
        gauges = self._metrics
        gauges.ring_bytes.set(sum(box.n_bytes for box in boxes))
        gauges.ring_frames.set(sum(len(box) for box in boxes))
        gauges.oldest_age_seconds.set(max(ages, default=0))
        gauges.credit_frames.set(sum(box.credit_frames() for box in boxes))
        gauges.pressure.set(max((peer.pressure() for peer in self._peers.values()), default=0))
        gauges.linked_gateways.set(self.linked_gateways())


def _refusal_label(reason: str) -> str:
    """Return why a record was refused as a metric label; a gateway could send any text."""
    return reason if reason in _RECORD_REFUSALS else OTHER


def _end_settings(config: LinkConfig) -> EndSettings:
    return EndSettings(
        limits=OutboxLimits(
            config.ring_bytes,
            config.ring_frames,
            tail=TAIL_LIMIT,
            stalled_seconds=config.stalled_abort_seconds,
        ),
        policy=InboxPolicy(config.credit_frames, config.credit_bytes),
        heartbeat_seconds=config.heartbeat_seconds,
        dead_after_seconds=config.dead_after_seconds,
        lost_seconds=config.stalled_abort_seconds,
    )
