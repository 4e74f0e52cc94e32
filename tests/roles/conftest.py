"""Worker loops over real engines, joined by an in-memory link and KV transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
    SpeculativeMethod,
)
from baton_worker.engine.api import Handoff
from baton_worker.engine.build import build_engine
from baton_worker.handoff.api import (
    HandoffArrived,
    HandoffDelivered,
    HandoffEvent,
    HandoffFailed,
    HandoffGranted,
)
from baton_worker.handoff.frames import decode_offer, encode_offer
from baton_worker.handoff.ledger import HandoffLedger
from baton_worker.handoff.places import PlaceLimits, Places, Reply
from baton_worker.handoff.room import Wish
from baton_worker.handoff.shares import OWN
from baton_worker.identity import RequestKey
from baton_worker.link.api import CommandReceived, Pressure
from baton_worker.messages import Command, DecodeTarget
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode, Finish, StepColumns
from baton_worker.records.rows import rows
from baton_worker.roles.loop import WorkerLoop
from baton_worker.roles.metrics import RoleMetrics
from baton_worker.roles.parts import LoopParts

GATEWAY = 77


PLACES = PlaceLimits(
    slots=16, receive_bytes=1 << 30, kv_tokens=1 << 20, asks=1024, queue_seconds=600.0
)


class MemoryLink:
    """The worker's side of a link whose gateway keeps every row it is sent."""

    def __init__(self) -> None:
        self.published: list[tuple[int, StepColumns]] = []
        self.level = Pressure.OPEN
        self.infos: list[Any] = []

    def publish(self, incarnation: int, columns: StepColumns, step_id: int) -> None:
        assert columns.n_rows > 0, "an empty record says nothing"
        self.published.append((incarnation, columns))

    def pressure(self, incarnation: int) -> Pressure:
        return self.level


@dataclass
class MemoryTransport:
    """KV transfer without sockets: offers pass the wire format, answers keep the promise."""

    peers: dict[str, Worker]
    owner: str
    places: Places
    is_deaf: bool = False
    open: dict[RequestKey, tuple[str, Handoff]] = field(default_factory=dict)
    answers: list[tuple[RequestKey, str]] = field(default_factory=list)
    asked: dict[RequestKey, str] = field(default_factory=dict)
    here: set[RequestKey] = field(default_factory=set)
    own: set[RequestKey] = field(default_factory=set)
    has_places: bool = False
    left: list[RequestKey] = field(default_factory=list)

    def offer(self, target: DecodeTarget, handoff: Handoff, deadline_seconds: float) -> None:
        key = RequestKey(handoff.state.handle, handoff.state.attempt)
        assert key not in self.open, "one offer at a time"
        self.open[key] = (target.worker_id, handoff)
        self.send(key)

    def send(self, key: RequestKey) -> None:
        worker_id, handoff = self.open[key]
        frames = [bytes(memoryview(frame)) for frame in encode_offer(handoff)]
        peer = self.peers[worker_id]
        if not peer.transport.is_deaf:
            n_bytes, state = sum(map(len, frames)), handoff.state
            reply = peer.transport.places.arrive(key, Wish(n_bytes, state.n_cached, 0))
            assert reply is not Reply.FULL
            peer.transport.here.add(key)
            peer.loop.inbox.put(HandoffArrived(decode_offer(frames), n_bytes))

    def ask(
        self, target: DecodeTarget, key: RequestKey, wish: Wish, deadline_seconds: float
    ) -> None:
        """Ask decode's book at once, as over a connection without delay."""
        self.asked[key] = target.worker_id
        peer = self.peers[target.worker_id].transport
        reply = peer.places.ask(key, wish, 0.0)
        if reply is Reply.OVER:
            self._refused(key, peer.places.refusal(key))
            return
        assert reply in (Reply.QUEUED, Reply.GRANTED), reply
        peer.grant()

    def _refused(self, key: RequestKey, code: ErrorCode | None) -> None:
        told = code or ErrorCode.HANDOFF_REFUSED
        failed = HandoffFailed(key, told, "the request is over", is_over=code is None)
        self.peers[self.owner].loop.inbox.put(failed)

    def ask_here(self, key: RequestKey, wish: Wish) -> None:
        self.own.add(key)
        reply = self.places.ask(key, wish, 0.0, OWN)
        assert reply is Reply.QUEUED, reply
        self.grant()

    def grant(self) -> None:
        for key in self.places.grant(0.0):
            if key in self.own:
                self.peers[self.owner].loop.inbox.put(HandoffGranted(key, 0.0))
            for peer in self.peers.values():
                if key in peer.transport.asked:
                    peer.loop.inbox.put(HandoffGranted(key, 0.0))

    def leave(self, key: RequestKey, *, code: ErrorCode | None = ErrorCode.HANDOFF_REFUSED) -> None:
        self.left.append(key)
        self.places.leave(key, code=code)
        self.grant()
        worker_id = self.asked.pop(key, None)
        if worker_id is not None:
            peer = self.peers[worker_id].transport
            if key not in peer.here:
                peer.places.leave(key)
                peer.grant()

    def cancel(self, key: RequestKey) -> None:
        self.open.pop(key, None)

    def acknowledge(self, key: RequestKey) -> None:
        self.places.imported(key)
        self.grant()
        self.answers.append((key, "imported"))
        self._tell(key, HandoffDelivered(key, 0.0, 0, 0.0))

    def refuse(self, key: RequestKey, code: ErrorCode | None, message: str) -> None:
        self.places.leave(key)
        self.grant()
        self.answers.append((key, code.name if code else "over"))
        told = code or ErrorCode.HANDOFF_REFUSED
        self._tell(key, HandoffFailed(key, told, message, is_over=code is None))

    def _tell(self, key: RequestKey, event: HandoffEvent) -> None:
        for peer in self.peers.values():
            if peer.transport.open.pop(key, None) is not None:
                peer.loop.inbox.put(event)


@dataclass
class Worker:
    """One worker's loop with what it published."""

    loop: WorkerLoop
    link: MemoryLink
    transport: MemoryTransport
    now: list[float]
    registry: CollectorRegistry

    def command(self, command: Command) -> None:
        self.loop.inbox.put(CommandReceived(GATEWAY, command))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn(0.0)

    def run(self, limit: int = 400) -> None:
        """Turn until nothing is left to do."""
        for _ in range(limit):
            self.loop.turn(0.0)
            if not self.loop.parts.engine.has_work() and not len(self.loop.inbox):
                return
        raise AssertionError("the loop does not come to rest")

    def rows(self, handle: int) -> list[Any]:
        everything = [row for _, columns in self.link.published for row in rows(columns)]
        return [row for row in everything if row.handle == handle]

    def tokens(self, handle: int) -> list[int]:
        """Return the merged output, positions checked for gaps."""
        out: list[int] = []
        for row in self.rows(handle):
            assert row.position <= len(out) or row.finish is not Finish.NONE, "a hole"
            out += list(row.tokens)[len(out) - row.position :] if row.tokens else []
        return out

    def finish(self, handle: int) -> Finish:
        ends = [row.finish for row in self.rows(handle) if row.finish is not Finish.NONE]
        assert len(ends) == 1, f"ended {len(ends)} times: {ends}"
        return Finish(ends[0])

    def is_clean(self) -> bool:
        load = self.loop.parts.engine.load()
        held = load.running + load.waiting + load.held_handoffs + load.kv_blocks_used
        places = self.transport.places
        held += places.n_taken + places.n_waiting + places.awaited_bytes
        held += len(self.loop.placeless)
        return held == 0 and len(self.loop.live) == 0 and self.loop.parts.ledger.n_open == 0


@pytest.fixture
def make_worker() -> Callable[..., Worker]:
    peers: dict[str, Worker] = {}

    def make(
        name: str,
        k: int = 2,
        ledger_capacity: int = 64,
        places: PlaceLimits = PLACES,
        method: SpeculativeMethod = "mtp",
        takes_prompts: bool = False,
        clock: Callable[[], float] | None = None,
        **engine: Any,
    ) -> Worker:
        config = ProcessConfig(
            model=ModelConfig(str(TINY_MODEL)),
            worker_id=name,
            speculative=SpeculativeConfig(method if k else "none", k),
            engine=EngineConfig(**{"max_running": 8, **engine}),
        )
        link, transport, now = MemoryLink(), MemoryTransport(peers, name, Places(places)), [0.0]
        transport.has_places = takes_prompts
        registry = CollectorRegistry()
        parts = LoopParts(
            engine=build_engine(config),
            link=link,  # type: ignore[arg-type]
            transport=transport,  # type: ignore[arg-type]
            ledger=HandoffLedger(ledger_capacity, memory_seconds=30.0),
            metrics=RoleMetrics(MetricFactory(registry, "tiny", "mixed")),
            handoff_deadline_seconds=5.0,
            observe=lambda stats, load: None,
            observe_load=lambda load: None,
            on_draining=lambda flag: link.infos.append("draining" if flag else "serving"),
        )
        loop = WorkerLoop(parts, clock=clock or (lambda: now[0]))
        worker = Worker(loop, link, transport, now, registry)
        peers[name] = worker
        return worker

    return make
