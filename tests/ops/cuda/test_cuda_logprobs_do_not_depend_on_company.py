"""A row's CUDA results are the same bits in any batch, on any run, after any other use."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import baton_ops

VOCAB = 103_424


def bits(columns: baton_ops.LogprobColumns) -> list[bytes]:
    """Return the columns' memory."""
    return [column.tobytes() for column in columns]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_and_in_a_large_batch(
    torch: ModuleType, run_logprobs: Callable[..., Any], dtype: str
) -> None:
    # 700 rows take several chunks per work item, one row takes single chunks.
    logits = torch.randn(700, VOCAB, device="cuda").to(getattr(torch, dtype))
    token = np.arange(700, dtype=np.int32) * 11
    k = np.full(700, 20, np.int32)
    batch = run_logprobs(logits, token, k)
    again = run_logprobs(logits, token, k, workspace=batch.workspace)
    assert bits(batch.columns) == bits(again.columns)
    for row in (0, 350, 699):
        alone = run_logprobs(logits[row : row + 1], token[row : row + 1], k[:1]).columns
        entries = slice(20 * row, 20 * row + 20)
        assert alone.logprob.tobytes() == batch.columns.logprob[row].tobytes()
        assert alone.rank[0] == batch.columns.rank[row]
        assert alone.topk_token.tobytes() == batch.columns.topk_token[entries].tobytes()
        assert alone.topk_logprob.tobytes() == batch.columns.topk_logprob[entries].tobytes()


def test_aligned_and_unaligned_rows(torch: ModuleType, run_logprobs: Callable[..., Any]) -> None:
    rows = torch.randn(4, 32_001, device="cuda").bfloat16()
    padded = torch.zeros(4, 32_008, device="cuda", dtype=torch.bfloat16)
    padded[:, :32_001] = rows
    token, k = np.array([5, 6, 7, 8], np.int32), np.full(4, 9, np.int32)
    unaligned = run_logprobs(rows, token, k).columns
    aligned = run_logprobs(padded[:, :32_001], token, k).columns
    assert bits(unaligned) == bits(aligned)


def test_one_workspace_serves_other_shapes(
    torch: ModuleType, run_logprobs: Callable[..., Any]
) -> None:
    large = torch.randn(300, VOCAB, device="cuda").bfloat16()
    small = torch.randn(5, 1_000, device="cuda")
    size = baton_ops.workspace_bytes(large.float(), 300)
    shared = torch.zeros(size, dtype=torch.uint8, device="cuda")
    for logits in (large, small, large, small):
        token = np.zeros(len(logits), np.int32)
        k = np.full(len(logits), 7, np.int32)
        fresh = run_logprobs(logits, token, k).columns
        assert bits(run_logprobs(logits, token, k, workspace=shared).columns) == bits(fresh)


def test_gathered_rows_and_a_device_side_count(
    torch: ModuleType, run_logprobs: Callable[..., Any]
) -> None:
    logits = torch.randn(50, 9_000, device="cuda")
    index = np.array([49, 3, 3, 17, 0, 8], np.int32)
    token = np.array([1, 2, 3, 4, 5, 6], np.int32)
    k = np.array([2, 0, -1, 4, 1, 2], np.int32)
    gathered = run_logprobs(logits, token, k, row_index=index).columns
    copied = run_logprobs(logits[torch.as_tensor(index, device="cuda").long()], token, k).columns
    assert bits(gathered) == bits(copied)
    out = [torch.full((8,), -777, dtype=d, device="cuda") for d in (torch.float32, torch.int32)]
    top = [torch.full((16,), -777, dtype=d, device="cuda") for d in (torch.int32, torch.float32)]
    size = baton_ops.workspace_bytes(logits, 6)
    device = {name: torch.as_tensor(a, device="cuda") for name, a in
              {"token": token, "k": k, "row_index": index}.items()}  # fmt: skip
    baton_ops.logprobs_into(
        logits,
        device["token"],
        device["k"],
        (*out, *top),
        offsets=tuple(torch.as_tensor(o, device="cuda") for o in baton_ops.offsets(k)),
        row_index=device["row_index"],
        num_rows=torch.tensor([4], dtype=torch.int32, device="cuda"),
        workspace=torch.zeros(size, dtype=torch.uint8, device="cuda"),
    )
    np.testing.assert_array_equal(out[0].cpu().numpy()[:3], gathered.logprob[:3])
    assert (out[0].cpu().numpy()[3:] == -777).all()
    np.testing.assert_array_equal(top[0].cpu().numpy()[:6], gathered.topk_token[:6])
    assert (top[0].cpu().numpy()[6:] == -777).all()
