"""The engine over Paddle: which parts serve a loaded checkpoint.

Owns how model, pool and scheduler are put together, over one rank or several. Importing it loads
Paddle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton_worker.engine.backends.paddle.decoder import Reduce
from baton_worker.engine.backends.parallel.group import RankGroup
from baton_worker.engine.backends.parallel.mirrored import MirroredModel, MirroredPool
from baton_worker.engine.backends.parallel.shard import ShardSizes, build_shard
from baton_worker.engine.closing import close_all
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.kv.pool import BlockAllocator, KvStore
from baton_worker.engine.model.shape import ModelShape, fingerprint
from baton_worker.engine.model.weights import Weights
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.parts import EngineParts
from baton_worker.engine.scheduling.prefix_cache import prefix_cache
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from baton_worker.engine.step.forward import ForwardModel
from baton_worker.engine.step.runner import Runner


class PaddleEngine(StepEngine):
    """`Engine` over Paddle.

    Args:
        shape: the model's shape.
        weights: the model; `weights.mtp` may have no more layers than `options.n_mtp`.
        options: resolved limits.
        clock: monotonic seconds, for the times in `StepStats`.
        parallel: the other ranks and the sum over all; then `weights` are rank 0's shard.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        options: EngineOptions,
        clock: Callable[[], float],
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(_build_parts(shape, weights, options, parallel), options, clock)
        self._ranks = parallel.ranks if parallel is not None else None

    def close(self) -> None:
        """End the other ranks, if there are any, also where the step in flight failed; no step may
        be under way.
        """
        close_all([super().close, *(() if self._ranks is None else (self._ranks.close,))])


class TensorParallel(NamedTuple):
    """The group that rank 0 has joined."""

    ranks: RankGroup
    reduce: Reduce


def _build_parts(
    shape: ModelShape, weights: Weights, options: EngineOptions, parallel: TensorParallel | None
) -> EngineParts:
    sizes = ShardSizes.of(options)
    model: ForwardModel
    pool: KvStore
    if parallel is None:
        model, pool = build_shard(shape, weights, sizes, is_shared=options.share_kv)
    else:
        ranks = parallel.ranks
        shard = build_shard(shape, weights, sizes, ranks.size, parallel.reduce)
        model, pool = MirroredModel(shard.model, ranks), MirroredPool(shard.pool, ranks)
    allocator = BlockAllocator(options.n_blocks)
    return EngineParts(
        shape=shape,
        fingerprint=fingerprint(shape, weights.identity),
        allocator=allocator,
        pool=pool,
        scheduler=Scheduler(
            SchedulerLimits.of(options),
            allocator,
            prefix_cache(allocator, options, fingerprint(shape, weights.identity)),
        ),
        runner=Runner(model, options.n_mtp, options.drafts),
    )
