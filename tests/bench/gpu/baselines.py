"""What the op is compared with: chains of framework ops, all producing the same columns.

The FastDeploy and vLLM chains are re-expressions in PyTorch of the order of their operations; no
code of theirs runs here. All take the batch's largest k for every row, as those engines do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton_baselines

Baseline = Callable[[torch.Tensor, torch.Tensor, int], Any]


def fastdeploy_order(x: torch.Tensor, token: torch.Tensor, k: int) -> Any:
    """Copy the accepted rows, divide, log_softmax, clip, gather, count, topk, two concats."""
    rows = torch.arange(len(x), device=x.device)
    logits = x.index_select(0, rows).float()
    logits = logits / torch.ones(len(x), 1, device=x.device)
    lp = logits.log_softmax(dim=1)
    lp.clamp_(min=torch.finfo(torch.float32).min)
    sampled = lp.gather(1, token.long()[:, None])
    rank = (lp >= sampled).sum(dim=1)
    if k == 0:
        return sampled, rank, None, None
    values, ids = lp.topk(k, dim=1)
    columns = torch.cat([sampled, values], dim=1)
    tokens = torch.cat([token[:, None].long(), ids], dim=1)
    return columns[:, 0], rank.int(), tokens[:, 1:].int(), columns[:, 1:]


def vllm_order(x: torch.Tensor, token: torch.Tensor, k: int) -> Any:
    """log_softmax in fp32, topk, gather, count, concat."""
    lp = x.log_softmax(dim=1, dtype=torch.float32)
    sampled = lp.gather(1, token.long()[:, None])
    rank = (lp >= sampled).sum(dim=1).int()
    if k == 0:
        return sampled[:, 0], rank, None, None
    values, ids = lp.topk(k, dim=1)
    columns = torch.cat([sampled, values], dim=1)
    return columns[:, 0], rank, ids.int(), columns[:, 1:]


def compiled_vllm_order() -> Baseline:
    """Return `vllm_order` under torch.compile with static shapes."""
    return torch.compile(vllm_order, dynamic=False)  # type: ignore[no-any-return]


ALL: dict[str, Baseline] = {
    "eager, FastDeploy's order": fastdeploy_order,
    "eager, vLLM's order": vllm_order,
    "torch.compile of vLLM's order": compiled_vllm_order(),
    "Triton, two-pass LSE + topk": triton_baselines.two_pass,
    "Triton, split one-pass": triton_baselines.split,
}
