"""The engine of a device: pool, runner and scheduler around weights that are there.

Owns how they are put together. Knows no framework, no checkpoint and no configuration file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from baton_worker.engine.api import DeviceLoad, EngineLoad
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.backends.device.runner import DeviceModel, DeviceRunner
from baton_worker.engine.backends.device.seam import Device, Kernels, MemoryUse
from baton_worker.engine.backends.device.weights import DeviceWeights
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.model.shape import ModelShape, fingerprint
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.scheduling.prefix_cache import prefix_cache
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits

_ASKED_SECONDS = 1.0


class LoadedModel(NamedTuple):
    """A model whose weights are on a device. `kernels`: made for the device."""

    device: Device
    kernels: Kernels
    model_shape: ModelShape
    weights: DeviceWeights

    @property
    def fingerprint(self) -> str:
        """See `model.shape.fingerprint`."""
        return fingerprint(self.model_shape, self.weights.identity)


class DeviceEngine(StepEngine):
    """`Engine` over a device.

    Args:
        model: its weights may be shared by several engines, one after the other.
        options: resolved limits; `use_mtp` only if the weights have an MTP layer.
        clock: monotonic seconds, for the times in `StepStats`.

    Raises:
        DeviceError: the device has too little memory for the pool or the largest step.
    """

    def __init__(
        self, model: LoadedModel, options: EngineOptions, clock: Callable[[], float]
    ) -> None:
        shape = kv_shape(model, options)
        staged_bytes = options.kv_bytes_per_step
        sharing = (options.share_kv, options.map_kv)
        self.pool = DevicePool(model.device, shape, staged_bytes, *sharing)
        self.runner = DeviceRunner(DeviceModel(*model, self.pool.tensor), options)
        self.model = model
        self._memory = _Memory(model.device, clock)
        super().__init__(parts_of(model, self.pool, self.runner, options), options, clock)

    def load(self) -> EngineLoad:
        """See `Engine.load`; the device's memory is asked after at most once a second."""
        use, launches = self._memory.use(), self.runner.launches
        device = DeviceLoad(
            memory_used=use.total - use.free,
            memory_total=use.total,
            memory_peak=use.peak,
            graphs_captured=launches.captured,
            graphs_kept=dict(launches.kept),
            launched=dict(launches.by_kind),
        )
        return dataclasses.replace(super().load(), device=device)


class _Memory:
    """What the device uses, asked seldom: the driver takes longer than a step's other counts."""

    def __init__(self, device: Device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._use = MemoryUse(0, 0, 0)
        self._asked_at = -math.inf

    def use(self) -> MemoryUse:
        now = self._clock()
        if now - self._asked_at >= _ASKED_SECONDS:
            self._use, self._asked_at = self._device.memory(), now
        return self._use


def kv_shape(model: LoadedModel, options: EngineOptions) -> KvShape:
    """Return the shape of the pool that an engine of these options keeps."""
    dtype = model.weights.dtype
    assert dtype in ("bfloat16", "float32"), "E is one of the two"
    return KvShape(
        n_layers=model.model_shape.n_layers + int(options.use_mtp),
        kv_heads=model.model_shape.n_kv_heads,
        block_size=options.block_size,
        head_dim=model.model_shape.head_dim,
        n_blocks=options.n_blocks,
        dtype=dtype,
        is_by_block=True,
    )


def parts_of(
    model: LoadedModel, pool: DevicePool, runner: DeviceRunner, options: EngineOptions
) -> EngineParts:
    """Return the parts of an engine over a pool that nobody else uses meanwhile."""
    allocator = BlockAllocator(options.n_blocks)
    prefixes = prefix_cache(allocator, options, model.fingerprint)
    return EngineParts(
        shape=model.model_shape,
        fingerprint=model.fingerprint,
        allocator=allocator,
        pool=pool,
        scheduler=Scheduler(SchedulerLimits.of(options), allocator, prefixes),
        runner=runner,
    )
