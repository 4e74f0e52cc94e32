"""One rank's share of a model: its heads, its part of the MLP, its heads' KV.

Owns the sizes that model, attention and pool of a rank must share; a worker without tensor
parallelism is the one rank of a group of one. Rank 0 alone computes logits, so only it keeps the
head; embeddings and norms are on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton_worker.engine.backends.paddle.attention import CpuPagedAttention
from baton_worker.engine.backends.paddle.decoder import Model, Reduce
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import local_shape
from baton_worker.engine.model.weights import Weights
from baton_worker.engine.options import MAX_DRAFTS, EngineOptions


@dataclass(frozen=True, slots=True)
class ShardSizes:
    """What every rank of a worker is sized by.

    Attributes:
        max_positions: rotation angles are tabulated for positions below this.
        n_mtp: MTP layers to load and keep the KV of.
    """

    block_size: int
    n_blocks: int
    max_positions: int
    n_mtp: int

    @classmethod
    def of(cls, options: EngineOptions) -> ShardSizes:
        """Return the sizes of a worker with these limits."""
        max_positions = options.max_model_len + 2 * (MAX_DRAFTS + 1)
        return cls(options.block_size, options.n_blocks, max_positions, options.n_mtp)


class ModelShard(NamedTuple):
    """A rank's model over its own pool."""

    model: Model
    pool: KvPool


def kv_shape(shape: ModelShape, sizes: ShardSizes) -> KvShape:
    """Return the pool of a model, or of a rank when `shape` is its local one."""
    return KvShape(
        n_layers=shape.n_layers + sizes.n_mtp,
        kv_heads=shape.n_kv_heads,
        block_size=sizes.block_size,
        head_dim=shape.head_dim,
        n_blocks=sizes.n_blocks,
        is_compressed=shape.mla is not None,
    )


def build_shard(
    shape: ModelShape,
    weights: Weights,
    sizes: ShardSizes,
    size: int = 1,
    reduce: Reduce | None = None,
    is_shared: bool = False,
) -> ModelShard:
    """Return one rank of `size`.

    Args:
        shape: the whole model.
        weights: this rank's.
        reduce: sums a tensor over the ranks; None for a group of one.
        is_shared: other processes may map its pool.
    """
    local = local_shape(shape, size)
    pool = KvPool(kv_shape(local, sizes), is_shared)
    value_size = local.mla.kv_rank if local.mla else 0
    attention = CpuPagedAttention(pool, local.n_heads, value_size)
    model = Model(local, weights, attention, sizes.max_positions, sizes.n_mtp, reduce)
    return ModelShard(model, pool)
