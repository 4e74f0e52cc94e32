"""What an engine is put together of, whatever computes its steps."""

from __future__ import annotations

from dataclasses import dataclass

from baton_worker.engine.kv.pool import BlockAllocator, KvStore
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.scheduling.scheduler import Scheduler
from baton_worker.engine.step.in_flight import StepRunner


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine works with, built together because the sizes must agree.

    Attributes:
        fingerprint: hash of the model's weights and shapes; only equal ones exchange handoffs.
    """

    shape: ModelShape
    fingerprint: str

    allocator: BlockAllocator
    pool: KvStore
    scheduler: Scheduler
    runner: StepRunner
