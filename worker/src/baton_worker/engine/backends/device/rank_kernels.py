"""What kernels do that ranks meet in: sums in the ranks' order, and what each has for all.

Owns the protocol. Every rank makes the same calls on the same shapes in the same order. Knows no
step and not how ranks find each other.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.operands import Norm, Tensor

MOST_RANKS = 8


class Exchange(NamedTuple):
    """One rank's sight of all ranks' exchange buffers: a head of flags, and two halves.

    addresses: i64[ranks], where this rank's kernels find each buffer, all of which are zeros before
    the first call. half_bytes: of each half, a multiple of 256. limit_ns: of waiting for others.
    """

    addresses: npt.NDArray[np.int64]
    rank: int
    half_bytes: int
    limit_ns: int


class RankKernels(Protocol):
    """Calls take the halves in turns, from one graph to the next too. A rank that does not come
    within the limit leaves NaN in the output of the others, whose heads say who it was: their first
    word is an int32, 0 or 1 + the rank. After that no call waits any more. It itself may go on with
    numbers that are finite and wrong, and know of nothing: see `rank_errors`.
    """

    def exchange_head_bytes(self) -> int:
        """Return where a buffer's first half begins."""

    def rank_sum(self, part: Tensor, exchange: Exchange, out: Tensor) -> None:
        """out E[N, W] = every rank's part E[N, W], added in fp32 from rank 0's on, rounded once.

        `part` lies at the beginning of a half and may hold anything behind the call; W * its bytes
        divide by 16.
        """

    def rank_sum_norm(
        self,
        part: Tensor,
        exchange: Exchange,
        room: Tensor,
        residual: Tensor,
        norm: Norm,
        out: Tensor,
    ) -> None:
        """Do `rank_sum`, and `add_norm` of that sum and residual to out; the same bits.

        `room` E[N, W] is memory for that sum, and may hold anything behind the call.
        """

    def rank_gather(self, part: Tensor, exchange: Exchange, out: Tensor) -> None:
        """out [ranks, N, W] = every rank's part [N, W]; otherwise as `rank_sum`."""

    def rank_errors(self, exchange: Exchange, out: Tensor) -> None:
        """out i32[ranks] = the first word of every rank's head, behind all calls before it: these
        gave what they should where all are 0. Meets nobody, and takes no half.
        """
