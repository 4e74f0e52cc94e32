"""What the ranks of a tensor-parallel group exchange on CUDA: sums in the ranks' order, records.

Each rank is a process, or a thread, with a GPU of its own and an exchange buffer that all ranks
have mapped: a head of flags and of what is pushed, zeros before the first call, and two halves. A
kernel writes a rank's part to a half; the call on that part meets the other ranks' and reads theirs
over the links. Owns the Python form of these ops and the layout of a buffer. How memory is mapped
it does not know.

Every rank makes the same calls, of the same shapes, in the same order, on one stream or in graphs
on it. Calls take the halves in turns, from one graph to the next too: a graph has an even number of
them. Nothing here allocates or waits on the host, and nothing is reset between calls or replays.

A rank that does not come in time does not hang the others: their output is NaN (of records: all
bits set), the error in their buffers' heads says why, and every later call gives up at once. It
itself, when it goes on, may have read what the others overwrote since, and see no error of its own.
So what a rank has computed holds where none has an error: `rank_errors_into` tells. Before the next
call the heads of all buffers must be zeroed, with no call under way.

Functions raise TypeError or ValueError where a dtype, shape or place is wrong; the message names
the argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from baton_ops._library import Tensor, launch, library

HALF_ALIGNMENT = 256
"""Buffers begin, and halves end, at multiples of so many bytes."""
HALF_REUSED = 9
"""The error of a rank that took one half twice running."""


class SumWay(IntEnum):
    """How a sum is made. All have the same bits, and every rank must take the same."""

    CHOSEN = 0
    ONE_SHOT = 1
    """Each rank reads all parts."""
    TWO_SHOTS = 2
    """Each rank sums a share, and reads the others'."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's sight of all exchange buffers.

    Attributes:
        buffers: i64[2, 4 or 8] on the host: the address of every rank's buffer as this process has
            it mapped, in the ranks' order.
        rank: whose sight it is.
        half_bytes: of each half, a multiple of `HALF_ALIGNMENT`.
        limit_ns: how long a call waits for the others, to within some microseconds.
    """

    buffers: Tensor
    rank: int
    half_bytes: int
    limit_ns: int


def exchange_bytes(half_bytes: int) -> int:
    """Return the size of a rank's exchange buffer."""
    return head_bytes() + 2 * half_bytes


def head_bytes() -> int:
    """Return where a buffer's first half begins.

    The head's first four bytes are the rank's error, an int32: 0, 1 + the number of a rank that did
    not come in time, or `HALF_REUSED`.
    """
    return int(library().cuda_exchange_head_bytes())


def rank_sum_into(
    part: Tensor, exchange: Exchange, out: Tensor, way: SumWay = SumWay.CHOSEN
) -> None:
    """Write out E[N, H] = the sum of all ranks' parts, in fp32 from rank 0's on, rounded once.

    All ranks get the same bits, and a row's depend on that row alone.

    Args:
        part: E or f32[N, H] at the beginning of a half of this rank's buffer, of which it is the
            other ranks' to read until the next call is complete. H * its bytes divide by 16. It may
            hold anything afterwards.
        exchange: where the others' parts are.
        out: written; not in the buffer.
        way: how, for tests and measurements.
    """
    launch("cuda_rank_sum")(
        part,
        exchange.buffers,
        exchange.rank,
        exchange.half_bytes,
        exchange.limit_ns,
        int(way),
        out,
    )


def rank_sum_norm_into(
    part: Tensor,
    exchange: Exchange,
    room: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """Do what `rank_sum_into` and `decoder.add_norm_into` of that do one after the other, with the
    same bits: residual E[N, H] gets the sum, rounded, and out E[N, H] what is normed.

    In one launch where each rank would read all parts (`SumWay.CHOSEN`: two ranks; four up to
    512 KiB a part, eight up to 256), for up to 128 rows of up to 8,192 columns, in eights and on
    whole vectors; else in two. Up to 16 rows of up to 16 KiB are pushed to the others, who read
    nothing then.

    Args:
        part: E[N, H]; otherwise as for `rank_sum_into`.
        exchange: where the others' parts are.
        room: E[N, H], contiguous, not in the buffer; it may hold anything afterwards.
        residual: its rows at any distance, as `out`'s; neither in the buffer.
        weight: E[H], the norm's.
        eps: the norm's.
        out: written.
    """
    launch("cuda_rank_sum_norm")(
        part,
        exchange.buffers,
        exchange.rank,
        exchange.half_bytes,
        exchange.limit_ns,
        room,
        residual,
        weight,
        float(eps),
        out,
    )


def rank_gather_into(part: Tensor, exchange: Exchange, out: Tensor) -> None:
    """Write out [R, N, W] = every rank's part [N, W], in the ranks' order.

    Args:
        part: of any type, as for `rank_sum_into`. W * its bytes divide by 16.
        exchange: where the others' parts are.
        out: as `part`; not in the buffer.
    """
    launch("cuda_rank_gather")(
        part, exchange.buffers, exchange.rank, exchange.half_bytes, exchange.limit_ns, out
    )


def rank_errors_into(exchange: Exchange, out: Tensor) -> None:
    """Write out i32[ranks] = the error in the head of each rank's buffer, behind all calls before.

    Where all are 0, what this rank's calls before it gave is right. It meets nobody and takes no
    half, so that one rank may make it alone.

    Args:
        exchange: where the heads are.
        out: on this rank's device, not in its buffer.
    """
    launch("cuda_rank_errors")(
        exchange.buffers, exchange.rank, exchange.half_bytes, exchange.limit_ns, out
    )
