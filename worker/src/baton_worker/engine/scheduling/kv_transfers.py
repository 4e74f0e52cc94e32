"""KV between handoffs and the pool, a bounded number of bytes a step.

Owns how far each import and export has come. A long prompt's KV is gigabytes: checked and copied
in one go it would hold up every row that decodes, so each step takes some blocks of it, the most
urgent request's first. A request joins the batch when all its KV is in, a handoff is offered when
all of it is out. Knows no queue and no step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import Handoff
from baton_worker.engine.kv.pool import KvStore
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.identity import RequestKey
from baton_worker.messages import HandoffState

KV_MAGNITUDE = 1e15
"""Largest |value| taken in a handoff. A masked position keeps a weight of 1.6e-28 on the CPU, so
larger values (or NaN) left in a block could disturb that block's next owner."""


class Imported(NamedTuple):
    """`complete`: handoffs that are all in the pool now; `refused`: whose KV is not fit, and why.

    No block of unfit values was written.
    """

    complete: dict[RequestKey, HandoffState]
    refused: dict[RequestKey, str]


@dataclass(slots=True, eq=False)
class _Export:
    request: RequestState
    state: HandoffState
    arrays: tuple[npt.NDArray[np.float32], ...]
    n_done: int = 0


class KvTransfers:
    """Imports into and exports out of one pool.

    Args:
        bytes_per_step: most bytes that one call moves; a block at least is always moved.
    """

    def __init__(self, pool: KvStore, bytes_per_step: int) -> None:
        shape = pool.shape
        per_layer = 2 * 4 * shape.kv_heads * shape.block_size * shape.head_dim
        self._pool = pool
        self._blocks_per_step = max(bytes_per_step // (per_layer * shape.n_layers), 1)
        self._exports: deque[_Export] = deque()

    @property
    def is_exporting(self) -> bool:
        """Whether a handoff is not all out yet."""
        return bool(self._exports)

    def import_some(self, requests: Sequence[RequestState]) -> Imported:
        """Check and copy the next blocks of requests with an incoming handoff, in this order."""
        imported = Imported({}, {})
        room = self._blocks_per_step
        for request in requests:
            if not room:
                break
            room -= self._import(request, room, imported)
        return imported

    def begin_export(self, request: RequestState, state: HandoffState) -> None:
        """Queue a held request's KV."""
        shape = self._pool.shape
        n_blocks = -(-state.n_cached // shape.block_size)
        size = (n_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        arrays = tuple(np.empty(size, np.float32) for _ in range(2 * shape.n_layers))
        self._exports.append(_Export(request, state, arrays))

    def export_some(self, is_held: Callable[[RequestState], bool]) -> tuple[Handoff, ...]:
        """Copy the next blocks and return the handoffs that are complete now.

        Args:
            is_held: whether a request still has its blocks; one that ended is dropped.
        """
        complete = []
        room = self._blocks_per_step
        while self._exports and room:
            export = self._exports[0]
            if is_held(export.request):
                room -= self._export(export, room)
                if export.n_done < len(export.arrays[0]):
                    break
                complete.append(Handoff(export.state, export.arrays))
            self._exports.popleft()
        return tuple(complete)

    def _import(self, request: RequestState, room: int, imported: Imported) -> int:
        assert request.incoming is not None, "the plan lists handoffs only"
        state, kv = request.incoming.state, request.incoming.kv
        start, total = request.n_imported_blocks, len(kv[0])
        stop = min(start + room, total)
        arrays = [array[start:stop] for array in kv]
        if not all(map(_is_tame, arrays)):
            imported.refused[request.key] = f"its KV holds NaN or a value beyond {KV_MAGNITUDE:g}"
            return stop - start
        self._pool.import_blocks(request.table[start:stop].tolist(), arrays)
        request.n_imported_blocks = stop
        if stop == total:
            request.incoming = None
            request.n_computed = state.n_cached
            imported.complete[request.key] = state
        return stop - start

    def _export(self, export: _Export, room: int) -> int:
        size, start = self._pool.shape.block_size, export.n_done
        stop = min(start + room, len(export.arrays[0]))
        blocks = export.request.table[start:stop].tolist()
        n_positions = min(export.state.n_cached, stop * size) - start * size
        parts = self._pool.export_blocks(blocks, n_positions)
        for array, part in zip(export.arrays, parts, strict=True):
            array[start:stop] = part
        export.n_done = stop
        return stop - start


def _is_tame(array: npt.NDArray[Any]) -> bool:
    return bool(array.max() <= KV_MAGNITUDE and array.min() >= -KV_MAGNITUDE)
