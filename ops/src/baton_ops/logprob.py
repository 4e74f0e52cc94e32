"""Logprobs of sampled tokens with rank and top-k, straight from logits.

Owns the Python form of the op and the layout of its ragged output. Knows no request and no engine.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from baton_ops._library import Tensor, library, op


class RankMode(enum.IntEnum):
    """What a token's rank is: how many logits reach it, or one more than how many exceed it."""

    AT_LEAST = 0
    ABOVE_PLUS_ONE = 1


class LogprobColumns(NamedTuple):
    """Ragged result in the step record's column order; rows with k = -1 have no entry.

    Attributes:
        logprob: f32[L], L = rows with k >= 0.
        rank: i32[L].
        topk_token: i32[K], K = sum of max(k, 0); a row's entries by (logprob desc, id asc).
        topk_logprob: f32[K].
    """

    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    topk_token: npt.NDArray[np.int32]
    topk_logprob: npt.NDArray[np.float32]


class Offsets(NamedTuple):
    """Where each row's results start, with the totals last.

    Attributes:
        row: i32[T + 1] into `logprob` and `rank`.
        topk: i32[T + 1] into `topk_token` and `topk_logprob`.
    """

    row: npt.NDArray[np.int32]
    topk: npt.NDArray[np.int32]


class LogprobOptions(TypedDict, total=False):
    """Optional arguments of `logprobs_into` that few callers need.

    Attributes:
        num_rows: i32[1], only the first so many rows count; default T.
        rank_mode: default AT_LEAST.
        workspace: CUDA only: u8[`workspace_bytes(logits, T)`] on the device, zeroed before its
            first call; calls of any shapes may follow each other, but not overlap.
    """

    num_rows: Tensor | None
    rank_mode: RankMode
    workspace: Tensor | None


def offsets(k: Tensor) -> Offsets:
    """Return the exclusive prefix sums that place each row's results.

    Args:
        k: i32[T] on the CPU; -1 writes nothing, 0 the token alone, n > 0 also n top entries.

    Raises:
        ValueError: the totals do not fit int32.
    """
    counts = np.asarray(k, dtype=np.int64)
    ends = np.zeros((2, counts.size + 1), np.int64)
    np.cumsum(counts >= 0, out=ends[0, 1:])
    np.cumsum(np.maximum(counts, 0), out=ends[1, 1:])
    if ends[1, -1] > np.iinfo(np.int32).max:
        raise ValueError(f"sum of k must fit int32, got {ends[1, -1]}")
    row, topk = ends.astype(np.int32)
    return Offsets(row, topk)


def workspace_bytes(logits: Tensor, n_tokens: int) -> int:
    """Return the bytes of workspace for T <= `n_tokens` and logits like these; 0 on the CPU.

    Raises:
        TypeError, ValueError: `logits` has a wrong dtype or shape.
    """
    return int(library().logprobs_workspace_bytes(logits, n_tokens))


def logprobs_into(
    logits: Tensor,
    token: Tensor,
    k: Tensor,
    out: LogprobColumns | tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    offsets: Offsets | tuple[Tensor, Tensor],
    row_index: Tensor | None = None,
    inv_temp: Tensor | None = None,
    **options: Unpack[LogprobOptions],
) -> None:
    """Write logprobs, ranks and top-k of T tokens, without allocating.

    With x the row's logits and s its inverse temperature:
    logprob(i) = (x_i - max x) * s - log sum_j exp((x_j - max x) * s). A logit of -inf gives
    -3.4028235e38, as does any logprob below that. A NaN sorts above +inf; a row that holds a NaN
    or +inf has no normaliser and its other logprobs are NaN. Equal logits are ordered by lower id.

    Args:
        logits: f32, f16 or bf16 [N, V], unit stride in a row, any stride between rows.
        token: i32[T], the sampled tokens, in [0, V).
        k: i32[T], in [-1, min(V, 64)].
        out: the outputs; each may be longer than needed, the rest stays untouched.
        offsets: `offsets(k)`, on the device of `logits`.
        row_index: i32[T], row of `logits` for each token; default the identity.
        inv_temp: f32[T] > 0, default 1; above 1e5 (a temperature below 1e-5) it means 1.
        options: see LogprobOptions.

    Raises:
        TypeError: a dtype is wrong, or an option is unknown.
        ValueError: a shape, device, stride or value is wrong; the message names it. Values of
            CUDA tensors are not checked.
        RuntimeError: CUDA tensors given to a build without CUDA kernels.
    """
    num_rows, rank_mode, workspace = _values(options) if options else (None, 0, None)
    op("logprobs", token, logits)(
        logits,
        token,
        k,
        row_index,
        inv_temp,
        *offsets,
        num_rows,
        rank_mode,
        workspace,
        *out,
    )


def _values(options: LogprobOptions) -> tuple[Tensor | None, int, Tensor | None]:
    unknown = options.keys() - LogprobOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"logprobs_into has no option {', '.join(sorted(unknown))}")
    rank_mode = int(options.get("rank_mode", RankMode.AT_LEAST))
    return options.get("num_rows"), rank_mode, options.get("workspace")


def logprobs(
    logits: Tensor,
    token: Tensor,
    k: Tensor,
    *,
    row_index: Tensor | None = None,
    inv_temp: Tensor | None = None,
    rank_mode: RankMode = RankMode.AT_LEAST,
) -> LogprobColumns:
    """Return `logprobs_into`'s result in new NumPy arrays. CPU tensors only.

    Raises:
        TypeError, ValueError: see `logprobs_into`.
    """
    places = offsets(k)
    n_rows, n_topk = int(places.row[-1]), int(places.topk[-1])
    out = LogprobColumns(
        np.empty(n_rows, np.float32),
        np.empty(n_rows, np.int32),
        np.empty(n_topk, np.int32),
        np.empty(n_topk, np.float32),
    )
    logprobs_into(
        logits,
        token,
        k,
        out,
        offsets=places,
        row_index=row_index,
        inv_temp=inv_temp,
        rank_mode=rank_mode,
    )
    return out
