"""A rank among those that compute each step together: what it adds to theirs, and gets of all.

Owns the exchange buffer, whose half is next, and what one that nobody came to says. A unit of work
- the launches of a step, of a piece of a prompt's logits - makes an even number of calls, so that
each begins with the same half and graphs may be replayed in any order. Knows no layer and no
process.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import RankDiedError
from baton_worker.engine.backends.device.operands import Norm
from baton_worker.engine.backends.device.rank_kernels import Exchange
from baton_worker.engine.backends.device.seam import Device, DType, Kernels, Mapped, Shared, Tensor
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import Shard, head_rows

_ALIGNMENT = 256
_GATHERED_ROWS = 256
"""Of logits at once: each rank's part of so many rows fills a half, however large a batch is."""
_WORD_BYTES = 4
_VOID = 4
"""Floats of a part that is exchanged for the number of calls alone."""


class ExchangeSizes(NamedTuple):
    """What is exchanged at most: bytes of a part of a sum, and rows and width of logits' parts."""

    sum_bytes: int
    rows: int
    width: int

    @classmethod
    def of(cls, shape: ModelShape, size: int, n_tokens: int, item_bytes: int) -> ExchangeSizes:
        """Return them for a model over so many ranks, and steps of up to `n_tokens`."""
        sum_bytes = n_tokens * shape.hidden_size * item_bytes
        return cls(sum_bytes, _GATHERED_ROWS, head_rows(shape.vocab_size, size))

    @property
    def half_bytes(self) -> int:
        """Of one half of the buffer."""
        most = max(self.sum_bytes, self.rows * self.width * _WORD_BYTES)
        return -(-most // _ALIGNMENT) * _ALIGNMENT

    def buffer_bytes(self, kernels: Kernels) -> int:
        """Of the whole buffer."""
        return kernels.exchange_head_bytes() + 2 * self.half_bytes


class Collective:
    """One rank's.

    Args:
        own: this rank's buffer, of `sizes`.
        buffers: of all ranks in their order, this one's own memory in its place.
        limit_seconds: how long a rank waits for the others.

    Attributes:
        shard: which rank it is, of how many.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        shard: Shard,
        sizes: ExchangeSizes,
        own: Shared,
        buffers: tuple[Tensor | Mapped, ...],
        limit_seconds: float,
    ) -> None:
        assert len(buffers) == shard.size, "a buffer of each rank"
        self.shard = shard
        self._device = device
        self._kernels = kernels
        self._sizes = sizes
        self._own = own
        self._buffers = buffers  # mapped as long as this lives
        addresses = np.array([device.address(buffer) for buffer in buffers], np.int64)
        limit_ns = int(limit_seconds * 1e9)
        self._exchange = Exchange(addresses, shard.rank, sizes.half_bytes, limit_ns)
        gathered = shard.size * sizes.rows * sizes.width * _WORD_BYTES
        self._gathered = device.empty((gathered,), "uint8")
        self._void = device.empty((1, _VOID), "float32")
        self._half = 0

    def part(self, n_rows: int, width: int, dtype: DType) -> Tensor:
        """Return memory for this rank's part of the next call."""
        at = self._kernels.exchange_head_bytes() + self._half * self._sizes.half_bytes
        return self._device.view(self._own.tensor, at, (n_rows, width), dtype)

    def sum(self, part: Tensor, out: Tensor) -> None:
        """Write the ranks' sum of what `part` returned, which has been written."""
        self._kernels.rank_sum(part, self._exchange, out)
        self._half ^= 1

    def sum_norm(
        self, part: Tensor, room: Tensor, residual: Tensor, norm: Norm, out: Tensor
    ) -> None:
        """Add that sum to the residual, and norm it; `room` is for the sum, or for nothing."""
        self._kernels.rank_sum_norm(part, self._exchange, room, residual, norm, out)
        self._half ^= 1

    def logits(self, normed: Tensor, head: Tensor, out: Tensor) -> None:
        """out f32[R, V] of normed states E[R, H], each rank's columns by its rows of the head.

        Args:
            head: E[W, H], `head_rows` of this rank, void ones behind its own.
        """
        rows = self._device.rows
        for start in range(0, out.shape[0], self._sizes.rows):
            stop = min(start + self._sizes.rows, out.shape[0])
            part = self.part(stop - start, self._sizes.width, "float32")
            self._kernels.matmul(rows(normed, start, stop), head, part)
            self._gather(part, rows(out, start, stop))

    def _gather(self, part: Tensor, out: Tensor) -> None:
        """Write the columns of all ranks side by side."""
        device, (n, width) = self._device, part.shape
        size = self.shard.size
        whole = device.view(self._gathered, 0, (size, n, width), "float32")
        flat = device.view(self._gathered, 0, (size * n, width), "float32")
        self._kernels.rank_gather(part, self._exchange, whole)
        self._half ^= 1
        for rank in range(size):
            ids = Shard(rank, size).vocabulary(out.shape[1])
            if ids.start < ids.stop:
                theirs = device.rows(flat, rank * n, (rank + 1) * n)
                theirs = device.columns(theirs, 0, ids.stop - ids.start)
                device.copy(theirs, device.columns(out, ids.start, ids.stop))

    def even(self) -> None:
        """End a unit of work: one more call if their number is odd."""
        if self._half:
            self.sum(self.part(1, _VOID, "float32"), self._void)

    def meet(self) -> None:
        """Let what is launched here later be behind what every rank launched before: a unit of two
        calls, at each of which all wait for all.
        """
        for _ in range(2):
            self.sum(self.part(1, _VOID, "float32"), self._void)

    def tell(self, out: Tensor) -> None:
        """Write what each rank says of all calls so far to out i32[ranks or more], for `refuse`."""
        self._kernels.rank_errors(self._exchange, self._device.rows(out, 0, self.shard.size))

    def refuse(self, told: npt.NDArray[np.int32]) -> None:
        """Look whether all came to all calls before `tell`, else what these gave is not to be used:
        whoever gave one up runs on over what that one, which knows nothing of it, still reads.

        Args:
            told: what `tell` wrote.

        Raises:
            RankDiedError: one did not come.
        """
        # Rank 0's own word last: one that stood still, and goes on, gives up who gave it up before.
        words = [*enumerate(told[: self.shard.size].tolist())]
        for rank, error in (*words[1:], words[0]):
            if error > self.shard.size:
                raise RankDiedError(f"the ranks' exchange was used out of turn (error {error})")
            if error:
                raise RankDiedError(
                    f"tensor-parallel rank {error - 1} did not come to a sum within "
                    f"{self._exchange.limit_ns / 1e9:g} s, as seen by rank {rank}"
                )
