"""Ops that exist on CUDA only: a decode step stays on the device from verification to the copy.

Verification, the plan of which rows get logprobs, nucleus-normalised logprobs, and the packing of
all results into one buffer. Nothing here allocates or waits, so a step can be a CUDA graph. Owns
the Python form of these ops. Knows no request and no engine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_ops._library import Tensor, library

PACK_HEADER_WORDS = 4


class StepPlan(NamedTuple):
    """What `logprobs_into` reads, for up to C rows. All on the device.

    Attributes:
        row_index, token, k: i32[C].
        inv_temp: f32[C].
        row_offset, topk_offset: i32[C + 1], the `offsets`.
        num_rows: i32[1].
        top_p: f32[C], for `normalise_top_p_into`; None where it is not wanted.
    """

    row_index: Tensor
    token: Tensor
    k: Tensor
    inv_temp: Tensor
    row_offset: Tensor
    topk_offset: Tensor
    num_rows: Tensor
    top_p: Tensor | None = None


class Drafts(NamedTuple):
    """What B requests proposed.

    Attributes:
        draft: i32[B, Kmax], valid in `[b, : draft_count[b]]`.
        draft_count: i32[B].
        cu_rows: i32[B + 1]; request b owns target rows `cu_rows[b] : cu_rows[b + 1]`. Those behind
            its first `draft_count[b] + 1` are padding.
    """

    draft: Tensor
    draft_count: Tensor
    cu_rows: Tensor


class Accepted(NamedTuple):
    """What verification writes: n_accepted i32[B] and token i32[B, Kmax + 1], -1 after the end."""

    n_accepted: Tensor
    token: Tensor


class Columns(NamedTuple):
    """The logprob op's outputs: f32[L], i32[L], i32[K], f32[K]; each may be longer."""

    logprob: Tensor
    rank: Tensor
    topk_token: Tensor
    topk_logprob: Tensor


class Packed(NamedTuple):
    """A packed buffer, read in place.

    Attributes:
        n_accepted: i32[B].
        token: i32[T].
        logprob: f32[L].
        rank: i32[L].
        topk_token: i32[K].
        topk_logprob: f32[K].
    """

    n_accepted: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    topk_token: npt.NDArray[np.int32]
    topk_logprob: npt.NDArray[np.float32]


def verify_greedy_into(target_token: Tensor, drafts: Drafts, out: Accepted) -> None:
    """Write what `verify_greedy` returns. `target_token` is i32[R].

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names it.
    """
    library().cuda_verify_greedy(target_token, *drafts, *out)


def verify_sampled_into(
    probs: Tensor,
    uniform: Tensor,
    drafts: Drafts,
    out: Accepted,
    *,
    draft_probs: Tensor | None = None,
    residual_uniform: Tensor | None = None,
) -> None:
    """Write what `verify_sampled` returns, up to draws within rounding of a boundary.

    A row that was needed and is not a distribution emits -1 and ends its request's acceptance: the
    device cannot raise.

    Args:
        probs: f32[R, V].
        uniform: f64[R] in [0, 1).
        drafts: the proposals.
        out: the results.
        draft_probs: f32[B, Kmax, V].
        residual_uniform: f64[R], with `draft_probs`.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names it.
    """
    library().cuda_verify_sampled(probs, uniform, draft_probs, residual_uniform, *drafts, *out)


def plan_into(
    accepted: Accepted,
    cu_rows: Tensor,
    k: Tensor,
    out: StepPlan,
    *,
    temperature: Tensor | None = None,
    first_row: Tensor | None = None,
    top_p: Tensor | None = None,
) -> None:
    """Write the rows that a step emitted, request by request, with their settings.

    Args:
        accepted: what verification wrote.
        cu_rows: i32[B + 1].
        k: i32[B], each request's k for `logprobs_into`; -1 for no logprobs.
        out: the plan; rows beyond its capacity are dropped.
        temperature: f32[B], default 1; below 1e-5 it means 1.
        first_row: i32[B], default 0; added to the rows that a request's logprobs are taken from.
        top_p: f32[B], default 1.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names it.
    """
    library().cuda_plan(*accepted, cu_rows, k, temperature, first_row, top_p, *out)


def normalise_top_p_into(
    logits: Tensor, plan: StepPlan, top_p: Tensor, logprob: Tensor, topk: tuple[Tensor, Tensor]
) -> None:
    """Renormalise logprobs to the nucleus, in rows whose `top_p` is in (0, 1).

    A token is dropped (its logprob becomes -3.4028235e38) where the mass ahead of it, by logit and
    then id, exceeds top_p. The others lose the log of the kept mass.

    Args:
        logits: what `logprobs_into` read.
        plan: what `logprobs_into` read.
        top_p: f32[C].
        logprob: f32[L], rewritten.
        topk: topk_token i32[K], and topk_logprob f32[K], which is rewritten.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names it.
    """
    library().cuda_normalise_top_p(
        logits,
        plan.token,
        plan.k,
        plan.row_index,
        plan.inv_temp,
        plan.row_offset,
        plan.topk_offset,
        plan.num_rows,
        top_p,
        logprob,
        *topk,
    )


def packed_words(batch: int, rows: int, entries: int) -> int:
    """Return the 32-bit words of a packed buffer that holds B, T and K up to these."""
    return PACK_HEADER_WORDS + batch + 3 * rows + 2 * entries


def pack_into(n_accepted: Tensor, plan: StepPlan, columns: Columns, packed: Tensor) -> None:
    """Write a step's results without gaps: one copy then brings them to the host.

    Args:
        n_accepted: i32[B].
        plan: gives the tokens and the places.
        columns: what `logprobs_into` wrote.
        packed: i32[`packed_words(...)`] on the device; read with `unpack`.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong; the message names it.
    """
    library().cuda_pack(
        n_accepted, plan.token, plan.row_offset, plan.topk_offset, plan.num_rows, *columns, packed
    )


def unpack(words: npt.NDArray[np.int32]) -> Packed:
    """Return views of a packed buffer's columns.

    Raises:
        ValueError: the buffer is shorter than its header says, so results were dropped.
    """
    batch, rows, outputs, entries = (int(n) for n in words[:PACK_HEADER_WORDS])
    ends = np.cumsum([PACK_HEADER_WORDS, batch, rows, outputs, outputs, entries, entries])
    if ends[-1] > words.size:
        raise ValueError(f"packed holds {words.size} words, its header asks for {ends[-1]}")
    parts = [words[ends[i] : ends[i + 1]] for i in range(6)]
    return Packed(
        parts[0],
        parts[1],
        parts[2].view(np.float32),
        parts[3],
        parts[4],
        parts[5].view(np.float32),
    )
