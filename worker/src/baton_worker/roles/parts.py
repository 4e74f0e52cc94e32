"""What the engine thread of a worker works with, put together once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton_worker.engine.api import Engine, EngineLoad, StepStats
from baton_worker.engine.progress import Progress
from baton_worker.handoff.api import KvTransport
from baton_worker.handoff.ledger import HandoffLedger
from baton_worker.link.api import WorkerLink
from baton_worker.roles.metrics import RoleMetrics
from baton_worker.roles.traces import RequestTraces


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the loop and its helpers work with, by contracts only.

    Attributes:
        observe: called after each step with its statistics and the engine's load.
        observe_load: called when the load changed without a step (a handoff was pulled).
        on_draining: told when draining begins (True) and when that is taken back, to announce
            it to the gateways.
        progress: told what this thread is at; the engine's own.
    """

    engine: Engine
    link: WorkerLink
    transport: KvTransport
    ledger: HandoffLedger
    metrics: RoleMetrics
    handoff_deadline_seconds: float
    observe: Callable[[StepStats, EngineLoad], None]
    observe_load: Callable[[EngineLoad], None]
    on_draining: Callable[[bool], None]
    progress: Progress = field(default_factory=Progress)
    traces: RequestTraces = field(default_factory=RequestTraces)
