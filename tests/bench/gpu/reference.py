"""The fp64 reference on the device, and how far a result is from it.

Owns the expected result. Written from the definitions, apart from the library under test.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LOWEST_LOGPROB = torch.finfo(torch.float32).min
ABSOLUTE_TOLERANCE = 2e-6
RELATIVE_TOLERANCE = 2e-7


class Expected(NamedTuple):
    """Per row: logprob f64[T], rank i64[T], and the `width` first entries in order.

    `topk_token` is i64[T, width], `topk_logprob` f64[T, width].
    """

    logprob: torch.Tensor
    rank: torch.Tensor
    topk_token: torch.Tensor
    topk_logprob: torch.Tensor


def log_softmax(x: torch.Tensor, inv_temp: torch.Tensor) -> torch.Tensor:
    """Return fp64 logprobs [T, V] of fp64 logits, with the op's rules for -inf and NaN."""
    hidden = torch.isneginf(x)
    highest = torch.where(hidden.all(1, keepdim=True), 0.0, x.amax(1, keepdim=True))
    shifted = (x - highest) * inv_temp.double()[:, None]
    normalised = shifted - shifted.exp().sum(1, keepdim=True).log()
    normalised = torch.where(normalised < LOWEST_LOGPROB, LOWEST_LOGPROB, normalised)
    return torch.where(hidden, LOWEST_LOGPROB, normalised)


def ranks(x: torch.Tensor, token: torch.Tensor, strict: bool) -> torch.Tensor:
    """Return the count of logits that reach the sampled one, or one more than exceed it."""
    sampled = x.gather(1, token.long()[:, None])
    nan = x.isnan()
    above = torch.where(sampled.isnan(), torch.zeros_like(nan), nan | (x > sampled)).sum(1)
    equal = torch.where(sampled.isnan(), nan, x == sampled).sum(1)
    return above + 1 if strict else above + equal


def expected(
    logits: torch.Tensor,
    token: torch.Tensor,
    width: int,
    *,
    inv_temp: torch.Tensor | None = None,
    strict: bool = False,
) -> Expected:
    """Return what the op must produce for every row of `logits` [T, V]."""
    x = logits.double()
    scale = torch.ones(len(x), device=x.device) if inv_temp is None else inv_temp
    lp = log_softmax(x, scale)
    same = torch.where(x == 0, 0.0, torch.where(x.isnan(), torch.nan, x))
    order = same.sort(dim=1, descending=True, stable=True).indices[:, :width]
    return Expected(
        lp.gather(1, token.long()[:, None])[:, 0],
        ranks(x, token, strict),
        order,
        lp.gather(1, order),
    )


def excess(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error over its tolerance; above 1 fails. NaN must meet NaN."""
    actual = actual.double()
    if actual.numel() == 0:
        return 0.0
    if not torch.equal(actual.isnan(), wanted.isnan()):
        return float("inf")
    allowed = ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * wanted.abs()
    return float(((actual - wanted).abs() / allowed).nan_to_num(0.0).max())
