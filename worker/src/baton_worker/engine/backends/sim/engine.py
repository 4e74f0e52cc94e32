"""The engine over the simulated model: the same loop, queues, sampling and logprobs as any other.

Owns how long a step takes and which parts stand in for a checkpoint. Loads no accelerator stack and
reads no weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from baton_worker.config import ConfigError, SimConfig
from baton_worker.engine.backends.sim.model import HEAD_DIM, SimModel
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import BlockAllocator, KvPool
from baton_worker.engine.model.shape import ModelShape, fingerprint
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.output.snapshot import StepSnapshot
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.scheduling.prefix_cache import prefix_cache
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from baton_worker.engine.step.in_flight import Mark
from baton_worker.engine.step.runner import Runner


class Time(NamedTuple):
    """`clock`: monotonic seconds; `sleep`: waits so many of them."""

    clock: Callable[[], float]
    sleep: Callable[[float], None]


def sim_shape(config: SimConfig, shape: ModelShape) -> ModelShape:
    """Return the shape of the model that is simulated in place of `shape`; it always drafts.

    Raises:
        ConfigError: more tokens than the model's tokenizer can turn into text.
    """
    if config.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"engine.sim.vocab_size is {config.vocab_size}, the model's is {shape.vocab_size}: "
            "larger ids have no text"
        )
    vocab_size = config.vocab_size or shape.vocab_size
    return replace(shape, vocab_size=vocab_size, n_mtp_layers=1)


def step_seconds(config: SimConfig, plan: StepPlan) -> float:
    """Return how long the simulated device takes for the step of `plan`."""
    n_fed = sum(chunk.n_tokens for chunk in plan.prefill)
    decode = config.decode_step_seconds + config.decode_row_seconds * len(plan.decode)
    return config.prefill_token_seconds * n_fed + (decode if plan.decode else 0.0)


class PacedRunner(Runner):
    """A runner whose steps last as long as the simulated device takes.

    Or as long as our own work, if that is more: it is what would run on the host meanwhile.
    """

    def __init__(self, config: SimConfig, model: SimModel, options: EngineOptions, time: Time):
        super().__init__(model, options.n_mtp, options.drafts)
        self._config = config
        self._time = time

    def run(self, plan: StepPlan, n_draft: int, mark: Mark = lambda n_layers: None) -> StepSnapshot:
        """See `Runner.run`."""
        ends = self._time.clock() + step_seconds(self._config, plan)
        snapshot = super().run(plan, n_draft, mark)
        missing = ends - self._time.clock()
        if missing > 0.0:
            self._time.sleep(missing)
        return snapshot


class SimEngine(StepEngine):
    """`Engine` without weights.

    Args:
        config: what to pretend.
        shape: `sim_shape`'s.
        options: resolved limits.
        clock: monotonic seconds.
        sleep: waits so many seconds of that clock.
    """

    def __init__(
        self,
        config: SimConfig,
        shape: ModelShape,
        options: EngineOptions,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = _build_parts(config, shape, options, Time(clock, sleep))
        super().__init__(parts, options, clock)


def _build_parts(
    config: SimConfig, shape: ModelShape, options: EngineOptions, time: Time
) -> EngineParts:
    kv_shape = KvShape(
        n_layers=1,
        kv_heads=1,
        block_size=options.block_size,
        head_dim=HEAD_DIM,
        n_blocks=options.n_blocks,
    )
    pool = KvPool(kv_shape, options.share_kv)
    allocator = BlockAllocator(options.n_blocks)
    model = SimModel(pool, shape.vocab_size, shape.eos_token_ids, config.acceptance, config.seed)
    identity = fingerprint(shape, f"sim-{config.seed}")
    cache = prefix_cache(allocator, options, identity)
    return EngineParts(
        shape=shape,
        fingerprint=identity,
        allocator=allocator,
        pool=pool,
        scheduler=Scheduler(SchedulerLimits.of(options), allocator, cache),
        runner=PacedRunner(config, model, options, time),
    )
