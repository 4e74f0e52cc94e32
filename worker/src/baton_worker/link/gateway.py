"""GatewayLink over ZeroMQ: one thread, one ROUTER, every worker that called home.

Owns the thread and the hand-over between it and the gateway's event loop. The socket is
`switchboard`'s, the protocol `worker_table`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from baton_worker.addresses import bindable, host_of_bind
from baton_worker.config import ConfigError, LinkConfig
from baton_worker.config_errors import bad_bind, cannot_listen
from baton_worker.identity import GatewayIdentity
from baton_worker.link.api import GatewayLinkEvent, WorkerDown, WorkerUp
from baton_worker.link.curve import load_identity, server_options
from baton_worker.link.gateway_end import GatewaySettings, LinkState
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.sockets import Socket, router, use_family_of
from baton_worker.link.switchboard import AppliedUpTo, QueuedCommand, Switchboard
from baton_worker.link.wakeup import Wakeup
from baton_worker.link.worker_table import WorkerTable
from baton_worker.link.zap import AllowedKeys, ZapHandler
from baton_worker.messages import Command, WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.records.layout import CONTROL_BYTES, CRC, SOFT_FRAME_BYTES

log = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0
_REVIEW_SECONDS = 1.0
_COMMAND_RING_BYTES = 64 << 20
_COMMAND_RING_FRAMES = 8192
_MAX_COMMAND_BYTES = SOFT_FRAME_BYTES - CONTROL_BYTES - CRC.size


class ZmqGatewayLink:
    """See `api.GatewayLink`."""

    def __init__(
        self, config: LinkConfig, identity: GatewayIdentity, metrics: MetricFactory
    ) -> None:
        """Check the configuration; nothing is opened before `start`.

        Args:
            config: address, credit, times, keys.
            identity: this process's; rows of another incarnation are dropped.
            metrics: where the link counts.

        Raises:
            ConfigError: bad key files.
        """
        self._config = config
        self._gateway = identity
        self._metrics = GatewayLinkMetrics(metrics)
        self._identity = load_identity(config.curve, is_client=False)
        self._allowed = (
            AllowedKeys("link.curve.allowed_keys_file", config.curve.allowed_keys_file)
            if self._identity
            else None
        )
        self._table = WorkerTable(_settings(config, identity), self._metrics, self._admit)
        self._commands: deque[QueuedCommand] = deque()
        self._applied: dict[str, AppliedUpTo] = {}
        self._applied_lock = threading.Lock()
        self._wakeup = Wakeup()
        self._closing = False
        self._reviewed_at = 0.0
        self._reviewed_version = 0
        self._on_events: Callable[[Sequence[GatewayLinkEvent]], None] = lambda events: None
        self._thread = threading.Thread(target=self._run, name="baton-link", daemon=True)
        self._started = threading.Event()
        self._start_error: zmq.ZMQError | None = None
        self.endpoint = config.bind

    def start(self, on_events: Callable[[Sequence[GatewayLinkEvent]], None]) -> None:
        """See `api.GatewayLink.start`. Sets `endpoint` to the address that was bound.

        Raises:
            ConfigError: `link.bind` is no endpoint, or cannot be bound.
        """
        if not host_of_bind(self._config.bind):
            raise ConfigError(bad_bind("link.bind", self._config.bind))
        self._on_events = on_events
        self._thread.start()
        self._started.wait()
        if self._start_error:
            number = self._start_error.errno
            message = cannot_listen("link.bind", self._config.bind, number)
            raise ConfigError(message) from self._start_error

    def send(self, worker_id: str, command: Command) -> bool:
        """See `api.GatewayLink.send`.

        Raises:
            ValueError: the command does not fit a frame; check prompts against `max_model_len`.
        """
        body = msgspec.msgpack.encode(command)
        if len(body) > _MAX_COMMAND_BYTES:
            raise ValueError(f"command of {len(body)} bytes exceeds {_MAX_COMMAND_BYTES}")
        end = self._table.ends.get(worker_id)
        if end is None or end.standing is not LinkState.UP:
            return False
        self._commands.append(QueuedCommand(end, body))
        self._wakeup.set()
        return True

    def applied(self, worker_id: str, epoch: int, seq: int) -> None:
        """See `api.GatewayLink.applied`.

        Raises:
            ValueError: `seq` has not been received.
        """
        end = self._table.ends.get(worker_id)
        if end and end.epoch == epoch and seq >= end.inbox.expected:
            raise ValueError(
                f"applied {seq} of {worker_id}, which has sent {end.inbox.expected - 1}"
            )
        with self._applied_lock:
            before = self._applied.get(worker_id)
            if before is None or before.epoch != epoch or before.seq < seq:
                self._applied[worker_id] = AppliedUpTo(epoch, seq)
        if end and (
            end.inbox.ack_due_at is None or seq - end.inbox.applied >= end.inbox.policy.ack_frames
        ):
            self._wakeup.set()

    def set_lag(self, seconds: float) -> None:
        """See `api.GatewayLink.set_lag`."""
        self._table.lag_seconds = seconds
        self._metrics.lag_seconds.set(seconds)

    def close(self) -> None:
        """See `api.GatewayLink.close`."""
        if not self._thread.is_alive():
            return
        self._closing = True
        self._wakeup.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        context.max_sockets = 8192
        zap = self._start_zap(context)
        try:
            socket = self._open(context)
        except zmq.ZMQError as error:
            self._start_error = error
        else:
            self._serve(socket)
        finally:
            self._started.set()
            if zap:
                zap.close()
            context.term()

    def _start_zap(self, context: zmq.Context[Socket]) -> ZapHandler | None:
        if self._allowed is None:
            return None
        zap = ZapHandler(context, self._allowed, self._metrics.handshake_failures.inc)
        zap.start()
        return zap

    def _open(self, context: zmq.Context[Socket]) -> Socket:
        config = self._config
        socket = router(context)
        if self._identity:
            server_options(socket, self._identity)
        endpoint = bindable(config.bind)
        use_family_of(socket, endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        bound = socket.last_endpoint
        assert isinstance(bound, bytes)
        self.endpoint = bound.decode()
        return socket

    def _serve(self, socket: Socket) -> None:
        board = Switchboard(socket, self._table, self._metrics, self._gateway)
        poller = zmq.Poller()
        for source in (socket, board.monitoring, self._wakeup.fileno()):
            poller.register(source, zmq.POLLIN)
        self._started.set()
        try:
            while not self._closing:
                ready = dict(poller.poll(int(1000 * board.wait_seconds)))
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                if board.monitoring in ready:
                    board.read_connections()
                self._turn(board)
        finally:
            board.close()
            if not self._closing:
                self._tell(self._table.abandon())

    def _turn(self, board: Switchboard) -> None:
        self._review_keys()
        self._tell(board.receive())
        board.apply(self._take_applied())
        self._tell(board.command(self._commands) + board.tick())
        board.flush()

    def _review_keys(self) -> None:
        # A live connection outlives its key, so the gateway itself must look.
        if self._allowed is None or time.monotonic() - self._reviewed_at < _REVIEW_SECONDS:
            return
        self._reviewed_at = time.monotonic()
        version = self._allowed.refresh()
        if version != self._reviewed_version:
            self._reviewed_version = version
            self._tell(self._table.review())

    def _tell(self, events: list[GatewayLinkEvent]) -> None:
        if any(isinstance(event, WorkerUp | WorkerDown) for event in events):
            ends = self._table.ends.values()
            self._metrics.workers_up.set(sum(end.standing is LinkState.UP for end in ends))
        if events:
            self._on_events(events)

    def _take_applied(self) -> list[tuple[str, AppliedUpTo]]:
        with self._applied_lock:
            taken = list(self._applied.items())
            self._applied.clear()
        return taken

    def _admit(self, user_id: str, info: WorkerInfo) -> str:
        if self._allowed is None:
            return ""
        if user_id not in self._allowed:
            return "key_revoked"
        role = self._allowed.role_of(user_id)
        if role is not None and role != info.role:
            return "role_not_allowed"
        name = self._allowed.name_of(user_id)
        return "impersonation" if name and name != info.worker_id else ""


def _settings(config: LinkConfig, identity: GatewayIdentity) -> GatewaySettings:
    return GatewaySettings(
        identity=identity,
        policy=InboxPolicy(config.credit_frames, config.credit_bytes),
        heartbeat_seconds=config.heartbeat_seconds,
        dead_after_seconds=config.dead_after_seconds,
        reconnect_seconds=config.reconnect_seconds,
        commands=OutboxLimits(_COMMAND_RING_BYTES, _COMMAND_RING_FRAMES),
    )
