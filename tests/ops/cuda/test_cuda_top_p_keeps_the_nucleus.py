"""Nucleus-normalised logprobs equal a sort and a cumulative sum in fp64."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

import baton_ops
from baton_ops import cuda, oracle

ROWS, K = 6, 10


def nucleus_logprobs(row: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """Return the row's logprobs after dropping what has more than `top_p` ahead of it."""
    lp = oracle.log_softmax(row, 1.0)
    if not 0 < top_p < 1 or np.isneginf(row).all():
        return lp
    order = oracle.order(row)
    p = np.exp(lp[order])
    kept = np.cumsum(p) - p <= top_p
    out = np.full(row.shape, oracle.LOWEST_LOGPROB)
    out[order[kept]] = lp[order[kept]] - np.log(p[kept].sum())
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["bulk", "flat", "peaked", "tied", "masked", "constant"])
def test_rows_with_and_without_top_p(
    torch: ModuleType, hard_rows: object, kind: str, dtype: str
) -> None:
    vocab = 20_011
    rows = hard_rows(kind, ROWS, vocab)  # type: ignore[operator]
    logits = torch.as_tensor(rows, device="cuda").to(getattr(torch, dtype))
    host = logits.double().cpu().numpy()
    token = np.argsort(-host, axis=1)[np.arange(ROWS), [0, 1, 2, 5, 50, 0]].astype(np.int32)
    k = np.full(ROWS, K, np.int32)
    top_p = np.array([0.9, 0.5, 0.123, 0.999, 1.0, 0.0], np.float32)
    places = baton_ops.offsets(k)
    device = [torch.as_tensor(a, device="cuda") for a in (token, k, *places)]
    plan = cuda.StepPlan(
        torch.arange(ROWS, dtype=torch.int32, device="cuda"),
        device[0],
        device[1],
        torch.ones(ROWS, device="cuda"),
        device[2],
        device[3],
        torch.tensor([ROWS], dtype=torch.int32, device="cuda"),
    )
    columns = cuda.Columns(
        torch.empty(ROWS, device="cuda"),
        torch.empty(ROWS, dtype=torch.int32, device="cuda"),
        torch.empty(ROWS * K, dtype=torch.int32, device="cuda"),
        torch.empty(ROWS * K, device="cuda"),
    )
    size = baton_ops.workspace_bytes(logits, ROWS)
    baton_ops.logprobs_into(
        logits,
        plan.token,
        plan.k,
        columns,
        offsets=(plan.row_offset, plan.topk_offset),
        workspace=torch.zeros(size, dtype=torch.uint8, device="cuda"),
    )
    cuda.normalise_top_p_into(
        logits, plan, torch.as_tensor(top_p, device="cuda"), columns.logprob, columns[2:]
    )
    got = columns.logprob.cpu().numpy()
    got_top = columns.topk_logprob.cpu().numpy().reshape(ROWS, K)
    top = columns.topk_token.cpu().numpy().reshape(ROWS, K)
    for t in range(ROWS):
        wanted = nucleus_logprobs(host[t], float(top_p[t])).astype(np.float32)
        np.testing.assert_allclose(got[t], wanted[token[t]], rtol=1e-6, atol=5e-6)
        np.testing.assert_allclose(got_top[t], wanted[top[t]], rtol=1e-6, atol=5e-6)
