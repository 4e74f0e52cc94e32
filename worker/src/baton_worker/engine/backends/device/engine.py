"""The engine of a device: pool, runner and scheduler around weights that are there.

Owns how they are put together. Knows no framework, no checkpoint and no configuration file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from baton_worker.engine.api import DeviceLoad, EngineLoad
from baton_worker.engine.backends.device.collective import Collective
from baton_worker.engine.backends.device.following import EngineFollowers
from baton_worker.engine.backends.device.orders import Followers
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.backends.device.ranked_pool import RankedPool
from baton_worker.engine.backends.device.runner import DeviceRunner
from baton_worker.engine.backends.device.seam import Device, DType, Kernels, MemoryUse
from baton_worker.engine.backends.device.steps import DeviceModel, Steps
from baton_worker.engine.backends.device.weights import DeviceWeights
from baton_worker.engine.closing import close_all
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import BlockAllocator, KvStore
from baton_worker.engine.model.shape import ModelShape, fingerprint
from baton_worker.engine.model.shards import local_shape
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.scheduling.prefix_cache import prefix_cache
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits

_ASKED_SECONDS = 1.0


class Team(NamedTuple):
    """Rank 0's place in a group of ranks, and what the others do for it.

    Attributes:
        followers: None on the other ranks.
        copier: opens the device of another rank, for copies into its memory; None on those.
    """

    collective: Collective
    followers: Followers | None = None
    copier: Callable[[int], Device] | None = None


class LoadedModel(NamedTuple):
    """A model whose weights are on a device, or a rank's part of them. `kernels`: made for the
    device. `model_shape`: of the whole model.
    """

    device: Device
    kernels: Kernels
    model_shape: ModelShape
    weights: DeviceWeights
    team: Team | None = None

    @property
    def n_ranks(self) -> int:
        """How many compute it together."""
        return 1 if self.team is None else self.team.collective.shard.size

    @property
    def fingerprint(self) -> str:
        """See `model.shape.fingerprint`."""
        return fingerprint(self.model_shape, self.weights.identity)


class DeviceEngine(StepEngine):
    """`Engine` over a device, or over those of several ranks.

    Args:
        model: its weights may be shared by several engines, one after the other. Of several ranks
            it is rank 0's.
        options: resolved limits; `use_mtp` only if the weights have an MTP layer.
        clock: monotonic seconds, for the times in `StepStats`.

    Raises:
        DeviceError: the device has too little memory for the pool or the largest step.
    """

    def __init__(
        self, model: LoadedModel, options: EngineOptions, clock: Callable[[], float]
    ) -> None:
        self._on_close: Callable[[], None] | None = None
        self._followers = _followers_of(model.team, options)
        own = local_pool(model, options)
        self.pool: DevicePool | RankedPool = own
        if self._followers is not None:
            shape = dataclasses.replace(own.shape, kv_heads=model.model_shape.n_kv_heads)
            assert model.team is not None, "whose followers they are"
            self.pool = RankedPool(
                model.device,
                own,
                shape,
                self._followers,
                model.team.collective,
                model.team.copier,
            )
        steps = Steps(local_model(model, own), options)
        self.runner = DeviceRunner(steps, options, self._followers)
        self.model = model
        self._memory = _Memory(model.device, clock)
        super().__init__(parts_of(model, self.pool, self.runner, options), options, clock)

    def close(self) -> None:
        """See `Engine.close`; the other ranks give their part back.

        Copies out of other pools that nobody waited for have ended then: they write into memory
        that is given back. All of it happens whatever fails, as `close_all` says.
        """
        closes = [super().close]
        if self.pool.sharing is not None:
            closes += [copier.synchronise for copier in self.pool.sharing.parts.copiers]
        if self._followers is not None:
            closes.append(self._followers.close)
        if self._on_close is not None:
            closes.append(self._on_close)
        close_all(closes)

    def on_close(self, call: Callable[[], None]) -> None:
        """Call this at the end of `close`."""
        self._on_close = call

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
    """Return the shape of the pool that an engine of these options keeps on each rank."""
    return kv_form(model.model_shape, options, model.weights.dtype, model.n_ranks)


def kv_form(model_shape: ModelShape, options: EngineOptions, dtype: DType, ranks: int) -> KvShape:
    """Return that shape for a model whose weights will be E on so many ranks."""
    assert dtype in ("bfloat16", "float32"), "E is one of the two"
    return KvShape(
        n_layers=model_shape.n_layers + options.n_mtp,
        kv_heads=local_shape(model_shape, ranks).n_kv_heads,
        block_size=options.block_size,
        head_dim=model_shape.head_dim,
        n_blocks=options.n_blocks,
        dtype=dtype,
        is_by_block=True,
        is_compressed=model_shape.mla is not None,
    )


def local_pool(model: LoadedModel, options: EngineOptions) -> DevicePool:
    """Return a rank's pool."""
    shape, staged_bytes = kv_shape(model, options), options.kv_bytes_per_step // model.n_ranks
    return DevicePool(model.device, shape, staged_bytes, options.share_kv, options.map_kv)


def local_model(model: LoadedModel, pool: DevicePool) -> DeviceModel:
    """Return what a rank computes."""
    return DeviceModel(
        model.device,
        model.kernels,
        local_shape(model.model_shape, model.n_ranks),
        model.weights,
        pool.tensor,
        None if model.team is None else model.team.collective,
    )


def _followers_of(team: Team | None, options: EngineOptions) -> EngineFollowers | None:
    if team is None:
        return None
    assert team.followers is not None, "rank 0 alone has an engine"
    return EngineFollowers(team.followers, options)


def parts_of(
    model: LoadedModel, pool: KvStore, runner: DeviceRunner, options: EngineOptions
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
