"""What the ops must compute, in NumPy and fp64: short, slow, and written from the definitions.

Independent of the native library by intent, so it shares no code with it beyond the result types.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_ops.logprob import LogprobColumns, RankMode
from baton_ops.verification import Verification

LOWEST_LOGPROB = float(np.finfo(np.float32).min)
_MIN_TEMPERATURE = 1e-5

FloatRow = npt.NDArray[np.float64]


def order(row: FloatRow) -> npt.NDArray[np.int64]:
    """Return token ids by (NaN first, value descending, id ascending)."""
    return np.lexsort((np.arange(row.size), -row, ~np.isnan(row)))


def log_softmax(row: FloatRow, inv_temp: float) -> FloatRow:
    """Return (x - max) * s - log sum exp((x - max) * s), and the lowest fp32 for x = -inf.

    NaN where the row holds a NaN or +inf, except at -inf.
    """
    masked = np.isneginf(row)
    out = np.full(row.shape, LOWEST_LOGPROB)
    if masked.all():
        return out
    if not np.isfinite(row[~masked]).all():
        out[~masked] = np.nan
        return out
    shifted = (row - row.max()) * inv_temp
    out[~masked] = (shifted - np.log(np.exp(shifted).sum()))[~masked]
    out.clip(min=LOWEST_LOGPROB, out=out)
    return out


def rank(row: FloatRow, token: int, mode: RankMode) -> int:
    """Return the rank of `token` under `mode`; NaN counts as the largest value."""
    sampled = row[token]
    nan = np.isnan(row)
    if np.isnan(sampled):
        above, equal = 0, int(nan.sum())
    else:
        above, equal = int((nan | (row > sampled)).sum()), int((row == sampled).sum())
    return above + equal if mode is RankMode.AT_LEAST else above + 1


def logprobs(
    logits: npt.NDArray[np.floating],
    token: npt.NDArray[np.int32],
    k: npt.NDArray[np.int32],
    *,
    row_index: npt.NDArray[np.int32] | None = None,
    inv_temp: npt.NDArray[np.float32] | None = None,
    rank_mode: RankMode = RankMode.AT_LEAST,
) -> LogprobColumns:
    """Return what `baton_ops.logprobs` must, its logprobs rounded from fp64 to fp32."""
    columns: tuple[list[float], list[int], list[int], list[float]] = ([], [], [], [])
    for t in range(len(token)):
        if k[t] < 0:
            continue
        row = logits[t if row_index is None else row_index[t]].astype(np.float64)
        scale = 1.0 if inv_temp is None else float(inv_temp[t])
        lp = log_softmax(row, 1.0 if 1.0 / scale < _MIN_TEMPERATURE else scale)
        top = order(row)[: k[t]]
        columns[0].append(lp[token[t]])
        columns[1].append(rank(row, int(token[t]), rank_mode))
        columns[2].extend(top)
        columns[3].extend(lp[top])
    return LogprobColumns(
        np.array(columns[0], np.float32),
        np.array(columns[1], np.int32),
        np.array(columns[2], np.int32),
        np.array(columns[3], np.float32),
    )


def sample(weight: FloatRow, uniform: float) -> int:
    """Return the smallest id whose cumulative weight exceeds `uniform` times the total."""
    cumulative = np.cumsum(weight)
    return int(np.argmax(cumulative > uniform * cumulative[-1]))


def verify_greedy(
    target_token: npt.NDArray[np.int32],
    draft: npt.NDArray[np.int32],
    draft_count: npt.NDArray[np.int32],
    cu_rows: npt.NDArray[np.int32],
) -> Verification:
    """Return what `baton_ops.verify_greedy` must: the longest matching prefix, then the target."""
    batch, max_drafts = draft.shape
    out = Verification(np.zeros(batch, np.int32), np.full((batch, max_drafts + 1), -1, np.int32))
    for b in range(batch):
        count = int(draft_count[b])
        target = target_token[cu_rows[b] : cu_rows[b + 1]]
        accepted = int(np.cumprod(draft[b, :count] == target[:count]).sum())
        out.n_accepted[b] = accepted
        out.token[b, : accepted + 1] = target[: accepted + 1]
    return out


def _decide(
    p: FloatRow, q: FloatRow, draft: int, uniform: float, residual_uniform: float
) -> tuple[int, bool]:
    """Return (token, accepted) for a draft sampled from q against the target p."""
    p, q = p / p.sum(), q / q.sum()
    if uniform * q[draft] < p[draft]:
        return draft, True
    residual = np.maximum(p - q, 0.0)
    return sample(residual if residual.sum() > 0 else p, residual_uniform), False


def verify_sampled(
    probs: npt.NDArray[np.float32],
    uniform: npt.NDArray[np.float64],
    draft: npt.NDArray[np.int32],
    draft_count: npt.NDArray[np.int32],
    cu_rows: npt.NDArray[np.int32],
    *,
    draft_probs: npt.NDArray[np.float32] | None = None,
    residual_uniform: npt.NDArray[np.float64] | None = None,
) -> Verification:
    """Return what `baton_ops.verify_sampled` must, up to draws within rounding of a boundary."""
    batch, max_drafts = draft.shape
    out = Verification(np.zeros(batch, np.int32), np.full((batch, max_drafts + 1), -1, np.int32))
    for b in range(batch):
        for i in range(int(draft_count[b]) + 1):
            row = int(cu_rows[b]) + i
            p, u = probs[row].astype(np.float64), float(uniform[row])
            if i == draft_count[b]:
                token, accepted = sample(p, u), False
            elif draft_probs is None or residual_uniform is None:
                token = sample(p, u)
                accepted = token == draft[b, i]
            else:
                q = draft_probs[b, i].astype(np.float64)
                token, accepted = _decide(p, q, int(draft[b, i]), u, float(residual_uniform[row]))
            out.token[b, i] = token
            out.n_accepted[b] += accepted
            if not accepted:
                break
    return out
