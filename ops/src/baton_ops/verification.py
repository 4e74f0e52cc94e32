"""Speculative acceptance: which drafts the target model's outputs accept, and what they emit.

Owns the acceptance rules. Knows neither where probabilities come from nor how drafts were made.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from baton_ops._library import Tensor, library, op


class Verification(NamedTuple):
    """What verification decided for B requests.

    Attributes:
        n_accepted: i32[B], leading drafts accepted.
        token: i32[B, Kmax + 1]; `token[b, : n_accepted[b] + 1]` are emitted, the rest is -1.
    """

    n_accepted: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]


Out = TypeVar("Out", bound=tuple[Tensor, Tensor])

_DLPACK_CUDA = 2


def _on_cuda(tensor: Tensor) -> bool:
    return int(tensor.__dlpack_device__()[0]) == _DLPACK_CUDA


def _output(draft: Tensor, on_cuda: bool, out: Out | None) -> Verification | Out:
    if out is not None:
        return out
    if on_cuda:
        raise ValueError("out must be given for CUDA tensors: no device memory is allocated here")
    batch, max_drafts = (int(size) for size in draft.shape)
    return Verification(np.empty(batch, np.int32), np.empty((batch, max_drafts + 1), np.int32))


@overload
def verify_greedy(
    target_token: Tensor, draft: Tensor, draft_count: Tensor, cu_rows: Tensor
) -> Verification: ...


@overload
def verify_greedy(
    target_token: Tensor, draft: Tensor, draft_count: Tensor, cu_rows: Tensor, *, out: Out
) -> Out: ...


def verify_greedy(
    target_token: Tensor,
    draft: Tensor,
    draft_count: Tensor,
    cu_rows: Tensor,
    *,
    out: Out | None = None,
) -> Verification | Out:
    """Accept drafts while they equal the target's own token; then emit the target's.

    CUDA tensors are verified on their device, without waiting for it.

    Args:
        target_token: i32[R], the token the target picked at each row.
        draft: i32[B, Kmax], valid in `[b, : draft_count[b]]`.
        draft_count: i32[B], in [0, Kmax].
        cu_rows: i32[B + 1]; request b owns rows `cu_rows[b] : cu_rows[b + 1]`, one per draft and
            one for the bonus token.
        out: where to write n_accepted i32[B] and token i32[B, Kmax + 1], and what to return; needed
            for CUDA tensors.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, device or value is wrong; the message names it. Values of CUDA tensors
            are not checked.
    """
    on_cuda = _on_cuda(target_token)
    result = _output(draft, on_cuda, out)
    verify = library().cuda_verify_greedy if on_cuda else op("verify_greedy", draft, draft)
    verify(target_token, draft, draft_count, cu_rows, *result)
    return result


@overload
def verify_sampled(
    probs: Tensor,
    uniform: Tensor,
    draft: Tensor,
    draft_count: Tensor,
    cu_rows: Tensor,
    *,
    draft_probs: Tensor | None = None,
    residual_uniform: Tensor | None = None,
) -> Verification: ...


@overload
def verify_sampled(
    probs: Tensor,
    uniform: Tensor,
    draft: Tensor,
    draft_count: Tensor,
    cu_rows: Tensor,
    *,
    draft_probs: Tensor | None = None,
    residual_uniform: Tensor | None = None,
    out: Out,
) -> Out: ...


def verify_sampled(
    probs: Tensor,
    uniform: Tensor,
    draft: Tensor,
    draft_count: Tensor,
    cu_rows: Tensor,
    *,
    draft_probs: Tensor | None = None,
    residual_uniform: Tensor | None = None,
    out: Out | None = None,
) -> Verification | Out:
    """Accept drafts so that every emitted token is distributed as the target's probabilities.

    Without `draft_probs`, drafts are point masses: the row's token is the smallest id whose
    cumulative probability exceeds its uniform, a draft is accepted when it is that token, and the
    first mismatch emits it. The emitted tokens then do not depend on the drafts at all.

    With `draft_probs` (q), the rule of Leviathan et al. 2023 (arXiv 2211.17192): draft d is
    accepted if u * q(d) < p(d); otherwise the token comes from max(p - q, 0), normalised, by
    inverse CDF at `residual_uniform`. The bonus token comes from the last row's p at `uniform`.

    Both p and q are normalised by their own fp64 sums. Rows after the first refusal are not read.

    CUDA tensors are verified on their device, without waiting for it, up to draws within rounding
    of a boundary. There a row that was needed and is no distribution cannot raise: it emits -1 and
    ends its request's acceptance.

    Args:
        probs: f32[R, V], the target's probabilities, any stride between rows.
        uniform: f64[R] in [0, 1).
        draft: i32[B, Kmax], valid in `[b, : draft_count[b]]`, there in [0, V).
        draft_count: i32[B], in [0, Kmax].
        cu_rows: i32[B + 1]; request b owns rows `cu_rows[b] : cu_rows[b + 1]`, one per draft and
            one for the bonus token.
        draft_probs: f32[B, Kmax, V], the distributions that drafts were sampled from.
        residual_uniform: f64[R] in [0, 1), independent of `uniform`; needed with `draft_probs`.
        out: as for `verify_greedy`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, device or value is wrong, or a row that was needed is not a
            distribution; the message names it. Values of CUDA tensors are not checked.
    """
    on_cuda = _on_cuda(probs)
    result = _output(draft, on_cuda, out)
    drafts, proposals = (draft, draft_count, cu_rows), (draft_probs, residual_uniform)
    if on_cuda:
        library().cuda_verify_sampled(probs, uniform, *proposals, *drafts, *result)
    else:
        verify = op("verify_sampled", probs, probs)
        verify(probs, uniform, *drafts, *proposals, *result)
    return result
