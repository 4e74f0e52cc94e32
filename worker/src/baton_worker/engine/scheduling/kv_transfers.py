"""KV between handoffs and the pool, a bounded number of bytes a step.

Owns how far each import and export has come. A long prompt's KV is gigabytes: checked and copied
in one go it would hold up every row that decodes, so each step takes some blocks of it, the most
urgent request's first. What a device pulls out of another one's pool goes on beside the steps, all
of it at once. A request joins the batch when all its KV is in, a handoff is offered when
all of it is out. Knows no queue and no step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import BegunBlocks, Handoff, KvFilled, KvInPool, LeaseName
from baton_worker.engine.kv.layers import Spans, count_layers, spans_of
from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KV_MAGNITUDE, is_tame
from baton_worker.engine.kv.pool import KvStore
from baton_worker.engine.kv.sharing import (
    GivenAwayError,
    Pull,
    PullLostError,
    UnfitKvError,
    is_over,
)
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.identity import RequestKey
from baton_worker.messages import HandoffState
from baton_worker.records.columns import ErrorCode

PULL_WAIT_SECONDS = 0.02
"""How long who has nothing else to do waits for a pull, before looking whether that is still so."""


class Refusal(NamedTuple):
    """Why KV is not taken."""

    code: ErrorCode
    reason: str


_FAILURES = {
    UnfitKvError: ErrorCode.INCOMPATIBLE,
    GivenAwayError: ErrorCode.HANDOFF_REFUSED,
    PullLostError: ErrorCode.HANDOFF_PEER_LOST,
}
_FAILED = (*_FAILURES,)


class Imported(NamedTuple):
    """`complete`: handoffs that are all in the pool now; `refused`: whose KV is not fit, or is not
    there any more.

    No block of unfit values was written.
    """

    complete: dict[RequestKey, HandoffState]
    refused: dict[RequestKey, Refusal]


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

    Attributes:
        n_pulled: layers of blocks that were read out of other pools, begun behind their offers.
        leases: of what lies in this pool for others to read; None where none can.
    """

    def __init__(self, pool: KvStore, bytes_per_step: int) -> None:
        self._pool = pool
        self._blocks_per_step = max(bytes_per_step // pool.shape.block_bytes, 1)
        self._exports: deque[_Export] = deque()
        self._under_way: list[_Part] = []
        self.n_pulled = 0
        self.leases = None if pool.sharing is None else Leases(pool.shape.n_blocks)
        self._staying: list[tuple[RequestState, Handoff]] = []

    @property
    def is_exporting(self) -> bool:
        """Whether a handoff is not all out yet."""
        return bool(self._exports)

    def arrived(self, requests: Iterable[RequestState]) -> Imported:
        """Return whose KV was pulled and has come, so that they decode in the step to be planned,
        and whose never will.
        """
        imported = Imported({}, {})
        for request in requests:
            if request.pull is not None and is_over(request.pull):
                self._end_pull(request, request.pull, imported)
        return imported

    def begin_pulls(self, requests: Iterable[RequestState]) -> None:
        """Begin to pull the KV of requests that have their blocks, where that goes on beside the
        steps: it comes while the step under way is waited for.
        """
        for request in requests:
            if self.pulls_beside(request):
                self._begun(request)

    def import_some(self, requests: Sequence[RequestState], may_wait: bool = False) -> Imported:
        """Check and copy the next blocks of requests with an incoming handoff, in this order.

        Args:
            may_wait: there is nothing else to do than to wait for what is pulled.
        """
        room = self._blocks_per_step
        beside = [self._begun(request) for request in requests if self.pulls_beside(request)]
        if may_wait and beside and not any(map(is_over, beside)):
            beside[0].wait(PULL_WAIT_SECONDS)  # for one: each may take as long
        imported = self.arrived(requests)
        for request in requests:
            if not room:
                break
            if not self.pulls_beside(request) and request.incoming is not None:
                room -= self._import(request, room, imported)
        return imported

    def begin_export(self, request: RequestState, state: HandoffState) -> None:
        """Queue a held request's KV, or tell where it stays."""
        shape = self._pool.shape
        if request.kv_stays:
            blocks = tuple(request.blocks[: shape.blocks_for(state.n_cached)])
            kv = KvInPool(blocks, self._lent(request))
            self._staying.append((request, Handoff(state, kv)))
            return
        forms = shape.arrays(shape.blocks_for(state.n_cached))
        arrays = tuple(np.empty(form.shape, form.dtype) for form in forms)
        self._exports.append(_Export(request, state, arrays))

    def filled(self, requests: Iterable[RequestState]) -> tuple[KvFilled, ...]:
        """Return what prompts that are not all computed have to pull since it was asked last."""
        told = []
        for request in requests:
            n_blocks = request.n_computed // self._pool.shape.block_size
            if request.kv_stays and n_blocks > request.n_told_blocks:
                request.n_told_blocks = n_blocks
                kv = KvInPool(tuple(request.blocks[:n_blocks]), self._lent(request))
                told.append(KvFilled(request.key, kv))
        return tuple(told)

    def filled_so_far(
        self, request: RequestState, start: int, stop: int, n_layers: int
    ) -> KvFilled:
        """Return what a prompt has to pull whose positions `start : stop` are being computed, the
        last of it, and are so up to a layer.
        """
        n_whole, n_blocks = start // self._pool.shape.block_size, self._pool.shape.blocks_for(stop)
        kv = KvInPool(tuple(request.blocks[:n_blocks]), self._lent(request))
        return KvFilled(request.key, kv, BegunBlocks(n_blocks - n_whole, n_layers))

    def export_some(self, is_held: Callable[[RequestState], bool]) -> tuple[Handoff, ...]:
        """Copy the next blocks and return the handoffs that are complete now.

        What a pool copies later is taken in the next call, behind a step's work at the most.

        Args:
            is_held: whether a request still has its blocks; one that ended is dropped.
        """
        staying = [handoff for request, handoff in self._staying if is_held(request)]
        self._staying.clear()
        self._take_arrived()
        self._exports = deque(export for export in self._exports if is_held(export.request))
        room = self._blocks_per_step
        for export in self._exports:
            room -= self._begin(export, room)
            if not room:
                break
        if not self._pool.exports_later:
            self._take_arrived()
        complete = staying
        while self._exports and self._exports[0].is_complete:  # room goes to the first until it is
            export = self._exports.popleft()
            complete.append(Handoff(export.state, export.arrays))
        return tuple(complete)

    def _lent(self, request: RequestState) -> LeaseName:
        """Return what its blocks are lent under, from now on if they were not."""
        assert self.leases is not None, "the pool is shared"
        if request.lease is None:
            request.lease = self.leases.begin()
        return LeaseName(request.lease.slot, request.lease.serial)

    def pulls_beside(self, request: RequestState) -> bool:
        """Whether its KV comes beside the steps, however much it is."""
        if request.incoming is None or not isinstance(request.incoming.kv, KvInPool):
            return False
        peer, sharing = request.incoming.kv.pool, self._pool.sharing
        return sharing is not None and bool(peer.goes_beside(sharing))

    def _begun(self, request: RequestState) -> Pull:
        """Begin to pull all of a request's KV, if that has not begun."""
        assert request.incoming is not None, "the plan lists handoffs only"
        kv = request.incoming.kv
        assert isinstance(kv, KvInPool), "asked before"
        if request.pull is None:
            request.pull = self._begin_pull(request, request.n_imported_blocks, len(kv.blocks))
        return request.pull

    def _end_pull(self, request: RequestState, pull: Pull, imported: Imported) -> None:
        try:
            pull.check()
        except _FAILED as error:
            imported.refused[request.key] = Refusal(_FAILURES[type(error)], str(error))
        else:
            request.pull = None
            self._complete(request, imported)

    def _begin_pull(self, request: RequestState, start: int, stop: int) -> Pull:
        """Begin to pull what is not here of blocks; without any (all came before the offer) look at
        the lease alone.
        """
        sharing, incoming, blocks = self._pool.sharing, request.incoming, request.table[start:stop]
        assert sharing is not None, "who attached the other pool"
        assert incoming is not None, "the plan lists handoffs only"
        assert isinstance(incoming.kv, KvInPool), "asked before"
        spans = self._missing(request, start, stop)
        self.n_pulled += count_layers(len(blocks), spans, self._pool.shape.n_layers)
        peer, theirs = incoming.kv.pool, incoming.kv.blocks[start:stop]
        pull: Pull = peer.pull(sharing, blocks.tolist(), theirs, incoming.kv.lease, spans)
        return pull

    def _missing(self, request: RequestState, start: int, stop: int) -> Spans | None:
        """Return the layers of blocks that did not come before the offer; None for all of all."""
        n_layers, done = self._pool.shape.n_layers, request.ahead.layers[start:stop]
        if not done:
            return None
        n_blocks = stop - start
        return spans_of([*done, *[0] * (n_blocks - len(done))], [n_layers] * n_blocks, n_layers)

    def _import(self, request: RequestState, room: int, imported: Imported) -> int:
        """Check and copy up to `room` blocks; return how many were looked at."""
        assert request.incoming is not None, "the plan lists handoffs only"
        kv = request.incoming.kv
        start = request.n_imported_blocks
        total = len(kv.blocks if isinstance(kv, KvInPool) else kv[0])
        stop = min(start + room, total)
        try:
            if isinstance(kv, KvInPool):
                self._begin_pull(request, start, stop).check()
            else:
                blocks = request.table[start:stop].tolist()
                self._copy_in(blocks, [array[start:stop] for array in kv])
        except _FAILED as error:
            imported.refused[request.key] = Refusal(_FAILURES[type(error)], str(error))
            return stop - start
        request.n_imported_blocks = stop
        if stop == total:
            self._complete(request, imported)
        return stop - start

    def _copy_in(self, blocks: list[int], arrays: list[npt.NDArray[Any]]) -> None:
        if not is_tame(arrays):
            raise UnfitKvError(f"its KV holds NaN or a value beyond {KV_MAGNITUDE:g}")
        self._pool.import_blocks(blocks, arrays)

    def _complete(self, request: RequestState, imported: Imported) -> None:
        assert request.incoming is not None, "whose KV has come"
        state, request.incoming = request.incoming.state, None
        request.settle(state.n_cached)
        imported.complete[request.key] = state

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
