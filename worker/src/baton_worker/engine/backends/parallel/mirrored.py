"""Rank 0's model and pool as the engine sees them: whole, though each rank computes its part.

Owns which orders a call becomes. The engine above does not know that there are other ranks: they
repeat every forward pass with the same tokens and tables, so their hidden states equal rank 0's.
Choosing rows and scoring stay on rank 0; the others are told of rows only when a pass needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.paddle.decoder import ForwardPlan, Model
from baton_worker.engine.backends.parallel import orders
from baton_worker.engine.backends.parallel.group import RankGroup
from baton_worker.engine.kv.layout import TokenGroup
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.step.forward import Array


class _Hidden(NamedTuple):
    """Rank 0's hidden states, and how another rank finds its own."""

    tensor: Array
    layer: int | None = None
    rows: npt.NDArray[np.int64] | None = None


class _Plan(NamedTuple):
    local: ForwardPlan
    groups: tuple[TokenGroup, ...]


class MirroredModel:
    """A `ForwardModel` that every rank repeats."""

    def __init__(self, model: Model, ranks: RankGroup) -> None:
        self._model = model
        self._ranks = ranks
        self._fed: _Plan | None = None

    def plan(self, groups: tuple[TokenGroup, ...]) -> _Plan:
        """See `ForwardModel.plan`."""
        return _Plan(self._model.plan(groups), groups)

    def forward(
        self,
        tokens: npt.NDArray[np.int64],
        plan: _Plan,
        mark: Callable[[int], None] | None = None,
    ) -> _Hidden:
        """See `ForwardModel.forward`; nobody is told of layers: no other process reads this KV."""
        self._ranks.tell(orders.Forward(orders.as_bytes(tokens), orders.pack_groups(plan.groups)))
        self._fed = plan
        return _Hidden(self._model.forward(tokens, plan.local))

    def select_rows(self, hidden: _Hidden, rows: npt.NDArray[np.int64]) -> _Hidden:
        """See `ForwardModel.select_rows`."""
        assert hidden.rows is None, "rows of rows would have to be told twice"
        return _Hidden(self._model.select_rows(hidden.tensor, rows), hidden.layer, rows)

    def logits(self, hidden: _Hidden, layer: int | None = None) -> Array:
        """See `ForwardModel.logits`."""
        return self._model.logits(hidden.tensor, layer)

    def broken_rows(self, hidden: _Hidden, count: int) -> npt.NDArray[np.bool_]:
        """See `ForwardModel.broken_rows`; sums over the ranks have made all theirs equal."""
        return self._model.broken_rows(hidden.tensor, count)

    def mtp_input(self, hidden: _Hidden, layer: int | None = None) -> _Hidden:
        """See `ForwardModel.mtp_input`."""
        assert hidden.layer == layer, "the other ranks infer it from the source"
        return hidden._replace(tensor=self._model.mtp_input(hidden.tensor, layer))

    def forward_mtp(
        self, tokens: npt.NDArray[np.int64], hidden: _Hidden, plan: _Plan, layer: int = 0
    ) -> _Hidden:
        """See `ForwardModel.forward_mtp`."""
        same = self._fed is not None and plan.groups is self._fed.groups
        order = orders.ForwardMtp(
            tokens=orders.as_bytes(tokens),
            layer=layer,
            source=hidden.layer,
            rows=None if hidden.rows is None else orders.as_bytes(hidden.rows),
            groups=None if same else orders.pack_groups(plan.groups),
        )
        self._ranks.tell(order)
        output = self._model.forward_mtp(tokens, hidden.tensor, plan.local, layer)
        return _Hidden(output, layer)


class MirroredPool:
    """A `KvStore` of whole heads over pools that each hold a part: rank r the r-th run of heads.

    So a handoff looks the same whatever the number of ranks on either side. Compressed rows have no
    heads: every rank keeps all of them, and rank 0 gives out its own.
    """

    def __init__(self, pool: KvPool, ranks: RankGroup) -> None:
        self._pool = pool
        self._ranks = ranks
        self._shape = pool.shape
        if not pool.shape.is_compressed:
            self._shape = replace(pool.shape, kv_heads=pool.shape.kv_heads * ranks.size)

    @property
    def shape(self) -> KvShape:
        """Of all ranks together."""
        return self._shape

    exports_later = False
    sharing = None  # no rank has all heads

    def begin_export(
        self, blocks: Sequence[int], n_positions: int
    ) -> Callable[[], tuple[npt.NDArray[Any], ...]]:
        """See `KvStore.begin_export`."""
        arrays = self.export_blocks(blocks, n_positions)
        return lambda: arrays

    def export_blocks(
        self, blocks: Sequence[int], n_positions: int
    ) -> tuple[npt.NDArray[np.float32], ...]:
        """See `KvPool.export_blocks`; heads of all ranks, in order."""
        if self._shape.is_compressed:
            return self._pool.export_blocks(blocks, n_positions)
        answers = self._ranks.ask(orders.Export(tuple(blocks), n_positions))
        own = self._pool.export_blocks(blocks, n_positions)
        return tuple(
            np.concatenate(
                [
                    array,
                    *(np.frombuffer(a.arrays[i], np.float32).reshape(array.shape) for a in answers),
                ],
                axis=1,
            )
            for i, array in enumerate(own)
        )

    def import_blocks(self, blocks: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """See `KvPool.import_blocks`; each rank gets its heads."""
        if self._shape.is_compressed:
            whole = tuple(orders.as_bytes(array) for array in arrays)
            self._ranks.tell(orders.Import(tuple(blocks), whole))
            self._pool.import_blocks(blocks, arrays)
            return
        local = self._pool.shape.kv_heads
        parts = [
            [array[:, rank * local : (rank + 1) * local] for array in arrays]
            for rank in range(self._ranks.size)
        ]
        self._ranks.tell_each(
            [
                orders.Import(tuple(blocks), tuple(orders.as_bytes(part) for part in own))
                for own in parts[1:]
            ]
        )
        self._pool.import_blocks(blocks, parts[0])
