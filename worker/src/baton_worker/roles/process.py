"""A worker process put together: engine, link, KV transport, health HTTP, signals.

The edge of the worker: the only place that knows every part by its concrete class. The engine loop
runs on the main thread; a fault in any thread ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from baton_worker import held_signals
from baton_worker.compatibility import (
    chat_template_hash,
    process_config_hash,
    process_semantic_hash,
    tokenizer_hash,
)
from baton_worker.config import ConfigError, ProcessConfig
from baton_worker.engine.api import DeviceError
from baton_worker.engine.build import build_engine
from baton_worker.engine.closing import close_all, closing_on_failure
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.metrics import EngineMetrics
from baton_worker.engine.model.checkpoint import CheckpointError
from baton_worker.engine.model.shape import ModelShapeError
from baton_worker.faults import EXIT_FAULT, end_on_thread_fault, ending_on_fault
from baton_worker.handoff.address import check_advertised
from baton_worker.handoff.ledger import HandoffLedger
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.pool_visits import PoolOwner
from baton_worker.handoff.security import check_keys, kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import Role
from baton_worker.link.api import GatewayUp, WorkerLinkEvent
from baton_worker.link.endpoints import static_endpoints
from baton_worker.link.worker import ZmqWorkerLink
from baton_worker.messages import FEATURES, WorkerInfo
from baton_worker.readiness import Ready
from baton_worker.records.layout import MAJOR
from baton_worker.roles.announced import Announced
from baton_worker.roles.event_queue import (
    EventQueue,
    StopRequested,
)
from baton_worker.roles.health import HealthSources
from baton_worker.roles.linked import LinkedReadiness
from baton_worker.roles.loop import WorkerLoop
from baton_worker.roles.metrics import RoleMetrics
from baton_worker.roles.parts import LoopParts
from baton_worker.roles.prompt_chunks import features_of, with_chunks_of
from baton_worker.roles.received import tell_room
from baton_worker.roles.starting import SIGNALS, Starting
from baton_worker.roles.traces import RequestTraces
from baton_worker.roles.watchdog import Watchdog
from baton_worker.tracing.build import build_tracing

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0
_LEDGER_MEMORY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Assembled:
    loop: WorkerLoop
    link: ZmqWorkerLink
    transport: ZmqKvTransport
    watchdog: Watchdog


@dataclass(frozen=True, slots=True)
class _KvAddress:
    endpoint: str
    public_key: str
    door: str
    features: tuple[str, ...]


def run_worker(config: ProcessConfig, role: Role, *, on_ready: Callable[[Ready], None]) -> int:
    """Serve as `role` until SIGTERM or SIGINT; return the exit code.

    `on_ready` is called once, when the model is loaded and the first gateway has welcomed us.

    Raises:
        ConfigError: the configuration cannot be served (model, keys, addresses).
    """
    _check(config, role)  # before the weights, which may take minutes
    config = with_chunks_of(config, role)
    end_on_thread_fault()  # before the engine, whose threads begin with it
    # Until `starting` handles them; its threads hold them for good, for while Paddle loads they
    # would meet its handler in any thread.
    with held_signals.held():
        starting = Starting(config, role)
        with starting.ending_on_signal(), closing_on_failure() as made:
            engine = _load_engine(config, starting.progress)
            made.append(engine.close)
            worker = _assemble(config, role, engine, starting)
    close = partial(_close, worker, starting, engine)
    with closing_on_failure() as made:
        made.append(close)
        for number in SIGNALS:
            signal.signal(number, lambda *_: starting.inbox.put(StopRequested("shutting down")))
        metrics_url = f"{starting.health.url}/metrics"
        ready = Ready(role.label, os.getpid(), metrics_url, control=starting.control.path)
        starting.serve(_health_sources(worker))
        worker.transport.start(worker.loop.inbox.put)
        worker.link.start(_announcing(worker.loop.inbox, partial(on_ready, ready)))
        worker.watchdog.start()
        with ending_on_fault():  # before the link could say goodbye
            worker.loop.run()
    close()
    return 0


def _close(worker: _Assembled, starting: Starting, engine: StepEngine) -> None:
    """Close every part, the engine behind who uses its memory, also where another one fails.

    Raises:
        Exception: the first failure.
    """
    close_all(
        [
            worker.watchdog.close,
            partial(worker.link.close, _CLOSE_SECONDS),
            worker.transport.close,
            starting.close,
            worker.loop.parts.traces.tracing.close,
            engine.close,
        ]
    )


def _check(config: ProcessConfig, role: Role) -> None:
    """Refuse addresses and keys that the parts would refuse when they are made."""
    static_endpoints(config.link)
    is_decode = role is Role.DECODE
    if is_decode:
        check_advertised(config.handoff)
    check_keys(config.link.curve, takes_offers=is_decode)
    if role is not Role.MIXED:
        _check_sharing(config)


def _check_sharing(config: ProcessConfig) -> None:
    """Refuse to demand a way for KV that this worker has not."""
    device, require = config.engine.device, config.handoff.require
    ranks = config.engine.tensor_parallel_size
    if require == "rdma" and config.handoff.nixl != "rdma":
        raise ConfigError(
            f"handoff.require is 'rdma', but handoff.nixl is {config.handoff.nixl!r}: set it to "
            "'rdma', which lets nothing go over TCP"
        )
    if require == "nvlink" and not config.handoff.shared_dir:
        raise ConfigError(
            f"handoff.require is {require!r}, but handoff.shared_dir is empty: name a folder that "
            "the prefill and decode workers of a host share"
        )
    if require == "rdma" and ranks > 1 and device == "cpu":
        raise ConfigError(
            f"handoff.require is 'rdma', but engine.tensor_parallel_size is {ranks} and "
            f"engine.device {device!r}: KV of several ranks is read by NIXL on gpus only; set "
            "handoff.require to 'any'"
        )
    if require == "nvlink" and device != "gpu":
        raise ConfigError(
            f"handoff.require is {require!r}, but engine.device is {device!r}: KV goes over NVLink "
            "between gpus only; set handoff.require to 'any'"
        )


def _load_engine(config: ProcessConfig, progress: LoadProgress) -> StepEngine:
    try:
        return build_engine(config, on_rank_death=_end_on_rank_death, progress=progress)
    except (ModelShapeError, CheckpointError) as error:
        raise ConfigError(f"model.path: {error}") from error
    except DeviceError as error:
        raise ConfigError(str(error)) from error


def _announcing(
    inbox: EventQueue, announce: Callable[[], None]
) -> Callable[[WorkerLinkEvent], None]:
    """Return the link's event sink: it queues, and announces readiness at the first gateway."""
    pending = [announce]

    def on_event(event: WorkerLinkEvent) -> None:
        if pending and isinstance(event, GatewayUp):
            pending.pop()()
        inbox.put(event)

    return on_event


def _assemble(
    config: ProcessConfig, role: Role, engine: StepEngine, starting: Starting
) -> _Assembled:
    with closing_on_failure() as made:
        config = with_name(config, role, starting.health.port)
        return _joined(config, role, engine, starting, made)


def _joined(
    config: ProcessConfig,
    role: Role,
    engine: StepEngine,
    starting: Starting,
    made: list[Callable[[], None]],
) -> _Assembled:
    """Return the parts; `made` is given how those are closed that are there so far."""
    factory, health = starting.factory, starting.health
    transport, kv_address = _kv_transport(config, role, HandoffMetrics(factory), engine)
    made.append(transport.close)
    if role is Role.DECODE:
        tell_room(config, engine)
    info = _worker_info(config, role, engine, kv_address, health.url)
    link = ZmqWorkerLink(config.link, info, factory)  # opens nothing before it is started
    tracing = build_tracing(config.tracing, f"baton-{role.label}", config.worker_id)
    made.append(tracing.close)
    role_metrics, engine_metrics = RoleMetrics(factory), EngineMetrics(factory)
    announced = Announced(info, link.set_info)
    role_metrics.wire(MAJOR, info.wire_min, info.wire_max, info.config_hash, info.revision)
    parts = LoopParts(
        engine=engine,
        link=link,
        transport=transport,
        ledger=HandoffLedger(
            info.max_running + info.max_waiting,
            _LEDGER_MEMORY_SECONDS,
            config.handoff.queue_seconds,
        ),
        metrics=role_metrics,
        handoff_deadline_seconds=config.handoff.deadline_seconds,
        observe=engine_metrics.observe,
        observe_load=engine_metrics.observe_load,
        on_draining=announced.set_draining,
        progress=engine.progress,
        traces=RequestTraces(tracing),
    )
    loop = WorkerLoop(parts, starting.inbox)

    def on_suspect(is_suspect: bool) -> None:
        role_metrics.suspect(is_suspect)
        announced.set_suspect(is_suspect)

    watchdog = Watchdog(engine.progress, loop.live.all, on_suspect)
    return _Assembled(loop, link, transport, watchdog)


def with_name(config: ProcessConfig, role: Role, health_port: int) -> ProcessConfig:
    """Return the configuration with a name that no other worker of this host has."""
    if config.worker_id:
        return config
    name = f"{role.label}-{socket.gethostname()}-{health_port}"
    log.info("worker named", extra={"worker_id": name})
    return msgspec.structs.replace(config, worker_id=name)


def _kv_transport(
    config: ProcessConfig, role: Role, metrics: HandoffMetrics, engine: StepEngine
) -> tuple[ZmqKvTransport, _KvAddress]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    takes_offers = role is Role.DECODE
    with closing_on_failure() as made:
        made.append(partial(context.destroy, 0))
        security = kv_security(
            config.link.curve, context, metrics.handshake_refused, takes_offers=takes_offers
        )
        made.append(security.close)
        transport = ZmqKvTransport(
            config.handoff,
            metrics,
            context=context,
            security=security,
            places=PlaceLimits.of(config, engine.load().kv_blocks_total) if takes_offers else None,
            owner=_pool_owner(config, role, engine),
        )
    address = _KvAddress(
        transport.endpoint, security.public_key, transport.door, transport.features
    )
    return transport, address


def _pool_owner(config: ProcessConfig, role: Role, engine: StepEngine) -> PoolOwner | None:
    sharing = engine.kv.sharing
    wanted = config.handoff.shared_dir or config.handoff.nixl != "off"
    if sharing is None and wanted and role is not Role.MIXED:
        log.warning(
            "this worker's KV is sent, not read where it lies: its ranks have parts of the pool, "
            "which are mapped, or read by NIXL, on GPUs alone",
            extra={"ranks": config.engine.tensor_parallel_size},
        )
    if sharing is None or engine.leases is None or role is Role.MIXED:
        return None
    folder, leases = config.handoff.shared_dir, engine.leases
    return PoolOwner(folder, sharing, engine.kv.shape, leases, config.worker_id)


def _health_sources(worker: _Assembled) -> HealthSources:
    loop, link = worker.loop, worker.link
    readiness = LinkedReadiness(link.known_gateways, link.linked_gateways, time.monotonic)
    return HealthSources(
        engine_silence_seconds=loop.parts.progress.seconds,
        is_suspect=lambda: worker.watchdog.is_suspect,
        is_overdue=loop.parts.progress.is_overdue,
        linked_gateways=link.linked_gateways,
        refusals=link.refusals,
        kv_ways=worker.transport.ways,
        kv_rates=worker.transport.rates,
        is_linked=readiness.is_ready,
        open_requests=loop.n_open,
        is_draining=lambda: loop.is_draining,
        num_speculative_tokens=lambda: loop.parts.engine.num_speculative_tokens,
        max_speculative_tokens=loop.parts.engine.max_speculative_tokens,
    )


def _worker_info(
    config: ProcessConfig, role: Role, engine: StepEngine, kv: _KvAddress, url: str
) -> WorkerInfo:
    load = engine.load()
    return WorkerInfo(
        worker_id=config.worker_id,
        role=int(role),
        wire_min=MAJOR,
        wire_max=MAJOR,
        semantic_hash=process_semantic_hash(config),
        config_hash=process_config_hash(config, engine.options.n_draft_layers),
        revision=config.revision,
        model=config.served_name,
        vocab_size=engine.shape.vocab_size,
        max_model_len=engine.options.max_model_len,
        max_top_k=engine.options.max_top_k,
        max_running=config.engine.max_running,
        max_waiting=config.engine.max_waiting,
        kv_capacity_tokens=load.kv_blocks_total * config.engine.block_size,
        kv_endpoint=kv.endpoint,
        kv_public_key=kv.public_key if kv.endpoint else "",
        metrics_url=f"{url}/metrics",
        pid=os.getpid(),
        tokenizer_hash=tokenizer_hash(config),
        features=(*FEATURES, *kv.features, *features_of(config, role)),
        model_fingerprint=engine.model_fingerprint,
        chat_template_hash=chat_template_hash(config),
        kv_door=kv.door,
        pair_group=config.pair_group,
    )


def _end_on_rank_death(error: Exception) -> None:
    """End the process: what is left of a tensor-parallel worker can neither step nor hand over."""
    log.critical("ending the process", extra={"why": str(error)})
    os._exit(EXIT_FAULT)
