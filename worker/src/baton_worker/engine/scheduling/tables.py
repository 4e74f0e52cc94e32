"""The block tables of requests: which blocks each gets, what of them holds its KV already, and how
it gives them back.

Owns the accounting between requests and the allocator. Knows neither who is next nor a step.
"""

from __future__ import annotations

from baton_worker.engine.api import KvInPool
from baton_worker.engine.kv.pool import NULL_BLOCK, BlockAllocator
from baton_worker.engine.scheduling.leaving_blocks import LeavingBlocks
from baton_worker.engine.scheduling.prefix_cache import PrefixCache
from baton_worker.engine.scheduling.requests import RequestState


class BlockTables:
    """See the module.

    Args:
        prefix: shares blocks between requests of equal beginnings; None for no sharing.

    Attributes:
        leaving: blocks of requests that are gone, which a pull still writes to.
    """

    def __init__(
        self, allocator: BlockAllocator, block_size: int, prefix: PrefixCache | None
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._prefix = prefix
        self.leaving = LeavingBlocks(allocator)

    @property
    def n_free(self) -> int:
        """Blocks nobody holds."""
        return self._allocator.n_free

    def missing(self, request: RequestState, n_positions: int) -> int:
        """Blocks that `n_positions` need beyond those owned; positions past the end need none."""
        n_positions = min(n_positions, request.max_total_tokens)
        return max(-(-n_positions // self._block_size) - request.n_blocks, 0)

    def fits(self, request: RequestState, n_positions: int, n_spared: int) -> bool:
        """Whether a request that owns nothing can have `n_positions`, and others `n_spared` blocks
        beside it.
        """
        n_missing = self.missing(request, n_positions)
        if self.n_free - n_missing >= n_spared:  # so it is nearly always, and cached ones cost less
            return True
        cached = self._cached(request)
        # Cached blocks need not be allocated, but those that are idle count as free until then.
        n_taken = n_missing - len(cached)
        n_taken += sum(map(self._allocator.is_idle, cached))
        return self.n_free - n_taken >= n_spared

    def extend(self, request: RequestState, count: int) -> None:
        """Give a request more blocks.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        blocks = self._allocator.allocate(count)
        request.table[request.n_blocks : request.n_blocks + count] = blocks
        request.n_blocks += count

    def reuse(self, request: RequestState) -> None:
        """Start a request behind the positions that cached blocks hold."""
        if request.is_pulled:
            self._adopt(request)
            return
        blocks = self._cached(request)
        self._allocator.share(blocks)
        request.table[: len(blocks)] = blocks
        request.n_blocks = request.n_named = len(blocks)
        request.n_computed = len(blocks) * self._block_size
        if request.admitted_at is None and request.incoming is None:
            request.n_reused = min(request.n_computed, request.n_prompt)

    def remember(self, *requests: RequestState) -> None:
        """Make what requests have computed findable."""
        if self._prefix is not None:
            for request in requests:
                self._prefix.remember(request)

    def release(self, request: RequestState) -> None:
        """Take a request's blocks back; nobody takes what is in them for its KV any more."""
        request.end_lease()
        if request.is_pulled:  # and so not whole, or what its owner gave to another meanwhile
            self._allocator.taint(request.blocks)
        self.remember(request)  # while it holds them: free blocks are not named
        self._free(request)
        self._let_go_ahead(request)
        request.table[:] = NULL_BLOCK
        request.n_blocks = request.n_named = 0

    def _free(self, request: RequestState) -> None:
        if request.pull is None:
            self._allocator.free(request.blocks)
            return
        assert request.incoming is not None, "what is pulled"
        assert isinstance(request.incoming.kv, KvInPool), "what is pulled"
        self.leaving.leave(request.blocks, request.pull, request.incoming.kv.pool)
        request.pull = None

    def _cached(self, request: RequestState) -> list[int]:
        if request.is_pulled:
            return self._allocator.kept(request.ahead.names)
        return self._prefix.match(request) if self._prefix is not None else []

    def _adopt(self, request: RequestState) -> None:
        """Start a request behind the blocks that were pulled before its offer came."""
        ahead = request.ahead
        blocks = self._allocator.adopt(ahead.names)
        layers = ahead.layers[: len(blocks)]
        self._let_go_ahead(request)
        request.table[: len(blocks)], ahead.layers = blocks, layers
        request.n_blocks = len(blocks)
        assert request.incoming is not None, "what is pulled"
        n_layers = request.incoming.state.n_layers
        parts = (index for index, count in enumerate(layers) if count < n_layers)
        request.n_imported_blocks = next(parts, len(blocks))

    def _let_go_ahead(self, request: RequestState) -> None:
        """Give back what was pulled before its offer; what is still coming finds no name then."""
        self._allocator.forget(request.ahead.cut(0))
