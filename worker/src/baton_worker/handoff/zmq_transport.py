"""KvTransport over ZeroMQ: frames straight from the tensors, one thread, no copy on the way out.

One ROUTER takes asks and offers (`receiver`); DEALERs to each decode worker make them (`sender`).
Only the transport's thread touches sockets; calls reach it through a queue and a wake-up. A lost
connection loses messages, so asks and offers are repeated over the next one and receivers
deduplicate (`places`, `ledger`).
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from baton_worker.addresses import bindable
from baton_worker.config import ConfigError, HandoffConfig
from baton_worker.config_errors import cannot_listen
from baton_worker.engine.api import Handoff, KvFilled, KvInPool
from baton_worker.engine.closing import close_all, closing_on_failure
from baton_worker.handoff.address import advertised, check_advertised
from baton_worker.handoff.api import (
    HandoffDelivered,
    HandoffEvent,
    HandoffFailed,
    HandoffGranted,
)
from baton_worker.handoff.dealers import STUCK_MS
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.nixl_agents import NixlAgents, agents_of, had
from baton_worker.handoff.nixl_pools import NixlPools
from baton_worker.handoff.nixl_visits import NixlVisits
from baton_worker.handoff.peer_pools import PeerPools
from baton_worker.handoff.places import PlaceLimits, Places
from baton_worker.handoff.pool_door import PoolDoor
from baton_worker.handoff.pool_visits import PoolOwner, PoolVisits
from baton_worker.handoff.pool_words import POOL_ID_BYTES
from baton_worker.handoff.receiver import Receiver, Sockets
from baton_worker.handoff.room import Wish
from baton_worker.handoff.security import Security
from baton_worker.handoff.sender import Sender, Sends
from baton_worker.handoff.senders import Senders
from baton_worker.handoff.ways import KvWays
from baton_worker.identity import RequestKey
from baton_worker.link.peer import FROZEN_SECONDS
from baton_worker.link.sockets import CALLING_AGAIN, HANDSHAKE_MS, close, monitor, use_family_of
from baton_worker.link.wakeup import Wakeup
from baton_worker.listening import ListeningClock
from baton_worker.messages import HANDOFF_NIXL, HANDOFF_NIXL_RANKS, DecodeTarget
from baton_worker.records.columns import ErrorCode

log = logging.getLogger(__name__)

_IDLE_POLL_SECONDS = 0.5
_MAX_FRAME_BYTES = 1 << 31
_STAYING_BYTES = 1
"""What a place is asked for where KV stays: the least that can be, for none lies in between."""


class ZmqKvTransport:
    """See `handoff.api.KvTransport`.

    Args:
        context: for its sockets and those of `security` alone.
        places: what this process has to give as decode; None for one that takes no offers.
        owner: its KV pool, if it is shared with other processes.
    """

    def __init__(
        self,
        config: HandoffConfig,
        metrics: HandoffMetrics,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        security: Security,
        places: PlaceLimits | None,
        owner: PoolOwner | None = None,
    ) -> None:
        self._config = config
        self._context = context
        self._security = security
        self._on_event: Callable[[HandoffEvent], None] = lambda event: None
        self._calls: deque[Callable[[], None]] = deque()
        self._poller, self._wakeup = zmq.Poller(), Wakeup()
        self._metrics, self._owner = metrics, owner
        self._listening = _listening_clock()
        self._pools = PeerPools(None, None)
        self._agents: NixlAgents | None = None
        self._ways: KvWays | None = None
        self._receiver: Receiver | None = None
        with closing_on_failure() as made:
            made.append(self._close_shared)  # which leaves no file behind, and no rank waiting
            pool_id = secrets.token_bytes(POOL_ID_BYTES)
            nixl_visits = self._share(owner, pool_id, takes_offers=places is not None)
            self._sender = Sender(
                metrics,
                self._poller,
                context,
                partial(self._socket, zmq.DEALER),
                security.client,
                sends=Sends(self._listening, config.send_bytes, pool_id, nixl_visits),
                make_calls=self._make_calls,
                on_event=self._tell,
            )
            if places is not None:
                self._receiver = self._bound_receiver(places)
            self._endpoint = self._bound_endpoint()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-transport", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where this process takes KV; empty when it takes none."""
        return self._endpoint

    @property
    def door(self) -> str:
        """Where prefill workers of this host make their pools known; empty where they cannot."""
        return self._pools.door_name

    @property
    def features(self) -> tuple[str, ...]:
        """What this process can do beyond what its version can."""
        return () if self._pools.nixl is None else (HANDOFF_NIXL, HANDOFF_NIXL_RANKS)

    def ways(self) -> dict[str, str]:
        """Return how KV goes to decode workers, by their names, where there is a choice."""
        return {} if self._ways is None else self._ways.told()

    def rates(self) -> dict[str, dict[str, float]]:
        """See `NixlVisits.rates`."""
        return {} if self._ways is None else self._ways.rates()

    def start(self, on_event: Callable[[HandoffEvent], None]) -> None:
        """Begin to serve."""
        self._on_event = on_event
        self._pools.start()
        self._thread.start()

    def ask(
        self, target: DecodeTarget, key: RequestKey, wish: Wish, deadline_seconds: float
    ) -> None:
        """Ask for a place, and have the pool mapped meanwhile if it is the first time there."""
        self._call(partial(self._ask, target, key, wish, deadline_seconds))

    @property
    def has_places(self) -> bool:
        """Whether this process takes offers."""
        return self._receiver is not None

    def ask_here(self, key: RequestKey, wish: Wish) -> None:
        """Ask for a place in the line that those stand in who ask over a socket."""
        assert self._receiver is not None, "a process that takes offers"
        self._call(partial(self._receiver.ask_here, key, wish))

    def tell_filled(self, target: DecodeTarget, filled: KvFilled) -> None:
        """Tell what can be pulled of a prompt that is still computed."""
        self._call(partial(self._sender.tell_filled, target, filled))

    def offer(self, target: DecodeTarget, handoff: Handoff, deadline_seconds: float) -> None:
        """Send a handoff, or where its KV lies; none that is required to stay and would travel."""
        if self._config.require != "any" and not isinstance(handoff.kv, KvInPool):
            message = f"{target.worker_id} gave no place for it beforehand, so its KV would travel"
            self._call(partial(self._not_as_required, handoff.state.key, message))
            return
        now = time.monotonic()
        self._call(partial(self._sender.offer, target, handoff, deadline_seconds, now))

    def cancel(self, key: RequestKey) -> None:
        """Forget an offer."""
        self._call(partial(self._sender.cancel, key))

    def leave(self, key: RequestKey, *, code: ErrorCode | None = ErrorCode.HANDOFF_REFUSED) -> None:
        """Give back a place."""
        self._call(partial(self._leave, key, code))

    def acknowledge(self, key: RequestKey) -> None:
        """Answer IMPORTED."""
        assert self._receiver is not None, "a process that takes offers"
        self._call(partial(self._receiver.acknowledge, key))

    def refuse(self, key: RequestKey, code: ErrorCode | None, message: str) -> None:
        """Answer REFUSED."""
        assert self._receiver is not None, "a process that takes offers"
        self._call(partial(self._receiver.refuse, key, code, message))

    def close(self) -> None:
        """End the thread, if it was started, and close every socket, also behind one that fails
        to.
        """
        first: list[Callable[[], None]] = []
        last: list[Callable[[], None]] = []
        if self._thread.ident is None:  # which would close them at its end, and leave the context
            first, last = [self._close_sockets], [partial(self._context.destroy, 0)]
        else:
            self._call(partial(setattr, self, "_closing", True))
            self._thread.join(timeout=5.0)
        close_all([*first, self._close_shared, self._security.close, *last])

    def _close_shared(self) -> None:
        # Agents first: that wakes who sends to a rank that takes nothing.
        parts = (self._agents, self._pools)
        close_all([part.close for part in parts if part is not None])

    def _call(self, action: Callable[[], None]) -> None:
        self._calls.append(action)
        self._wakeup.set()

    def _leave(self, key: RequestKey, code: ErrorCode | None) -> None:
        self._sender.leave(key)
        if self._receiver is not None:
            self._receiver.leave(key, code=code)

    def _ask(
        self, target: DecodeTarget, key: RequestKey, wish: Wish, deadline_seconds: float
    ) -> None:
        if self._ways is not None:
            self._ways.ask(target, _heard)
            if self._ways.stays(target):  # what is read in place needs none of its memory
                wish = wish._replace(kv_bytes=_STAYING_BYTES)
        self._sender.ask(target, key, wish, deadline_seconds)

    def _tell_granted(self, event: HandoffGranted, wish: Wish, why_not: str) -> None:
        if why_not and self._config.require != "any":
            self._not_as_required(event.key, why_not)
        elif why_not and wish.kv_bytes == _STAYING_BYTES:
            message = f"its place has no memory for KV that travels, and {why_not}"
            self._sender.fail(HandoffFailed(event.key, ErrorCode.HANDOFF_REFUSED, message))
        else:
            self._on_event(dataclasses.replace(event, kv_stays=not why_not))

    def _not_as_required(self, key: RequestKey, why_not: str) -> None:
        message = f"handoff.require is {self._config.require!r}, and {why_not}"
        self._sender.fail(HandoffFailed(key, ErrorCode.HANDOFF_REFUSED, message))

    def _tell(self, event: HandoffEvent) -> None:
        """Pass an event on; a place once it is known how KV would go there."""
        if isinstance(event, HandoffGranted) and self._ways is not None:
            target, wish = self._sender.asked(event.key)
            self._ways.ask(target, partial(self._tell_granted, event, wish))
            return
        if isinstance(event, HandoffDelivered):
            self._count(event)
        self._on_event(event)

    def _count(self, event: HandoffDelivered) -> None:
        if event.pulled_blocks and self._owner is not None and self._ways is not None:
            n_bytes = event.pulled_blocks * self._owner.shape.block_bytes
            self._metrics.pools.delivered(self._ways.way_to(event.decode), n_bytes)
        else:
            self._metrics.pools.delivered("zmq", event.sent_bytes)

    def _share(
        self, owner: PoolOwner | None, pool_id: bytes, *, takes_offers: bool
    ) -> NixlVisits | None:
        """Open the ways for KV that is not sent; returns how prefill has its pool read by NIXL."""
        if owner is None:
            return None
        agents = self._agents = agents_of(self._config, pool_id, owner.sharing)
        nixl_visits = None
        if takes_offers:
            self._pools = self._peer_pools(owner, agents)
        else:
            nixl_visits = _nixl_visits(self._config, owner, agents, pool_id)
            visits = PoolVisits(owner, self._call, pool_id) if owner.folder else None
            transport, require = owner.sharing.transport, self._config.require
            self._ways = KvWays(transport, require, visits, nixl_visits)
        if agents is not None and self._pools.nixl is None and nixl_visits is None:
            agents.close()  # `had` has said why nothing is read by them
            self._agents = None
        return nixl_visits

    def _bound_receiver(self, places: PlaceLimits) -> Receiver:
        security, metrics = self._security, self._metrics
        return Receiver(
            metrics,
            self._listening,
            self._bind(),
            Places(places),
            Senders(security.refused, metrics.handshake_refused),
            self._make_calls,
            self._tell,
            self._pools,
        )

    def _peer_pools(self, owner: PoolOwner, agents: NixlAgents | None) -> PeerPools:
        pools, own = self._metrics.pools, owner.sharing
        nixl = door = None
        if agents is not None:
            deadline = self._config.deadline_seconds
            given = (agents.own, own, deadline, pools, self._call, agents.others)
            nixl = had(self._config, partial(NixlPools, *given))
        if owner.folder:
            door = PoolDoor(owner.folder, own, pools)
        return PeerPools(door, nixl)

    def _bound_endpoint(self) -> str:
        if self._receiver is None:
            return ""
        router = self._receiver.router
        return advertised(self._config, router.getsockopt_string(zmq.LAST_ENDPOINT))

    def _bind(self) -> Sockets:
        check_advertised(self._config)
        router = self._socket(zmq.ROUTER, self._context)
        router.set(zmq.SNDHWM, 0)  # answers are small, and none may be lost on a live connection
        router.set(zmq.RCVHWM, 0)  # a full queue would let a peer end this process: `link.sockets`
        endpoint = bindable(self._config.bind)
        use_family_of(router, endpoint)
        self._security.server(router)
        monitoring = monitor(router)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            close(router)
            monitoring.close(linger=0)
            raise ConfigError(
                cannot_listen("handoff.bind", self._config.bind, error.errno)
            ) from error
        return Sockets(router, monitoring)

    def _socket(self, kind: int, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        socket.set(zmq.TCP_KEEPALIVE, 1)  # how decode notices that a silent host is gone
        socket.set(zmq.TCP_KEEPALIVE_IDLE, 15)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
        for option, value in CALLING_AGAIN.items():
            socket.set(option, value)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        return socket

    def _run(self) -> None:
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        if self._receiver is not None:
            self._poller.register(self._receiver.router, zmq.POLLIN)
            self._poller.register(self._receiver.monitoring, zmq.POLLIN)
        try:
            while not self._closing:
                self._turn()
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        parts = (self._receiver, self._sender, self._ways)
        close_all([part.close for part in parts if part is not None])

    def _turn(self) -> None:
        due_seconds = self._sender.due_seconds()
        wait = _IDLE_POLL_SECONDS
        if due_seconds is not None:
            wait = max(0.0, min(wait, due_seconds))
        ready = dict(self._poller.poll(int(wait * 1000) + 1))
        self._listening.look(time.monotonic())
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        self._make_calls()
        if self._receiver is not None:
            if self._receiver.monitoring in ready:
                self._receiver.read_connections()
            if self._receiver.router in ready:
                self._receiver.receive()
            self._receiver.review()
        self._sender.turn(ready)

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()


def _listening_clock() -> ListeningClock:
    """Return what others are late by, with the patience in which a connection breaks."""
    return ListeningClock(
        time.monotonic(), most_seconds=FROZEN_SECONDS, catch_up_seconds=STUCK_MS / 1000
    )


def _nixl_visits(
    config: HandoffConfig, owner: PoolOwner, agents: NixlAgents | None, pool_id: bytes
) -> NixlVisits | None:
    if agents is None:
        return None
    facts = (owner.worker_id, owner.shape, owner.sharing, owner.leases)
    parts = [rank.part for rank in agents.others]
    return had(config, partial(NixlVisits, agents.own, pool_id, *facts, parts))


def _heard(why_not: str) -> None:
    """Take the outcome of a visit that nobody waits for yet; it is in the log."""
