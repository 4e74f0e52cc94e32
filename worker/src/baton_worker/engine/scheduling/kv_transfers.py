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
from baton_worker.engine.kv.payload import KV_MAGNITUDE, is_tame
from baton_worker.engine.kv.pool import KvStore
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.identity import RequestKey
from baton_worker.messages import HandoffState


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
    arrays: tuple[npt.NDArray[Any], ...]
    n_begun: int = 0
    n_done: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all of it has arrived."""
        return self.n_done == len(self.arrays[0])


class _Part(NamedTuple):
    """Blocks `start : stop` of an export, on their way."""

    export: _Export
    start: int
    stop: int
    arrived: Callable[[], tuple[npt.NDArray[Any], ...]]


class KvTransfers:
    """Imports into and exports out of one pool.

    Args:
        bytes_per_step: most bytes that one call moves; a block at least is always moved.
    """

    def __init__(self, pool: KvStore, bytes_per_step: int) -> None:
        self._pool = pool
        self._blocks_per_step = max(bytes_per_step // pool.shape.block_bytes, 1)
        self._exports: deque[_Export] = deque()
        self._under_way: list[_Part] = []

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
        forms = shape.arrays(shape.blocks_for(state.n_cached))
        arrays = tuple(np.empty(form.shape, form.dtype) for form in forms)
        self._exports.append(_Export(request, state, arrays))

    def export_some(self, is_held: Callable[[RequestState], bool]) -> tuple[Handoff, ...]:
        """Copy the next blocks and return the handoffs that are complete now.

        What a pool copies later is taken in the next call, behind a step's work at the most.

        Args:
            is_held: whether a request still has its blocks; one that ended is dropped.
        """
        self._take_arrived()
        self._exports = deque(export for export in self._exports if is_held(export.request))
        room = self._blocks_per_step
        for export in self._exports:
            room -= self._begin(export, room)
            if not room:
                break
        if not self._pool.exports_later:
            self._take_arrived()
        complete = []
        while self._exports and self._exports[0].is_complete:  # room goes to the first until it is
            export = self._exports.popleft()
            complete.append(Handoff(export.state, export.arrays))
        return tuple(complete)

    def _import(self, request: RequestState, room: int, imported: Imported) -> int:
        assert request.incoming is not None, "the plan lists handoffs only"
        state, kv = request.incoming.state, request.incoming.kv
        start, total = request.n_imported_blocks, len(kv[0])
        stop = min(start + room, total)
        arrays = [array[start:stop] for array in kv]
        if not is_tame(arrays):
            imported.refused[request.key] = f"its KV holds NaN or a value beyond {KV_MAGNITUDE:g}"
            return stop - start
        self._pool.import_blocks(request.table[start:stop].tolist(), arrays)
        request.n_imported_blocks = stop
        if stop == total:
            request.incoming = None
            request.n_computed = state.n_cached
            imported.complete[request.key] = state
        return stop - start

    def _begin(self, export: _Export, room: int) -> int:
        size, start = self._pool.shape.block_size, export.n_begun
        stop = min(start + room, len(export.arrays[0]))
        if start == stop:
            return 0
        blocks = export.request.table[start:stop].tolist()
        n_positions = min(export.state.n_cached, stop * size) - start * size
        arrived = self._pool.begin_export(blocks, n_positions)
        self._under_way.append(_Part(export, start, stop, arrived))
        export.n_begun = stop
        return stop - start

    def _take_arrived(self) -> None:
        """Wait for what was begun, and keep it; also that of requests which have ended since."""
        for part in self._under_way:
            for array, values in zip(part.export.arrays, part.arrived(), strict=True):
                array[part.start : part.stop] = values
            part.export.n_done = part.stop
        self._under_way.clear()
