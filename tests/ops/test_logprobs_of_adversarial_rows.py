"""Rows built against the kernel's shortcuts: its group maxima, its running maximum, its sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import baton_ops
from baton_ops import oracle

VOCAB = 5_003
LOWEST = np.float32(-3.4028234663852886e38)


NORMAL = np.random.default_rng(7).standard_normal(VOCAB) * 3
IDS = np.arange(VOCAB)
ROWS = {
    "ascending": np.sort(NORMAL),
    "descending": np.sort(NORMAL)[::-1],
    "constant": np.full(VOCAB, 2.5),
    "all masked": np.full(VOCAB, -np.inf),
    "one left": np.where(IDS == 4_000, -50.0, -np.inf),
    "one dominant": np.where(IDS == VOCAB - 1, 80.0, NORMAL),
    "high offset": NORMAL + 1e4,
    "low offset": NORMAL - 1e4,
    "top values in one group": np.where((IDS >= 640) & (IDS < 760), 20 + IDS % 7, NORMAL),
    "tied maxima in every group": np.where(IDS % 97 == 0, 9.0, NORMAL),
    "masked head": np.where(IDS < 3_000, -np.inf, NORMAL),
    "wide range": np.linspace(-3e38, 3e38, VOCAB),
}


@pytest.mark.parametrize("rank_mode", baton_ops.RankMode)
@pytest.mark.parametrize("k", [0, 1, 3, 20, 64])
@pytest.mark.parametrize("name", ROWS)
def test_equals_the_oracle(
    isa: str,
    poisoned_logprobs: Callable[..., Any],
    assert_columns_match: Callable[..., None],
    name: str,
    k: int,
    rank_mode: baton_ops.RankMode,
) -> None:
    token = np.array([0, 1, 641, 4_000, VOCAB - 1], np.int32)
    logits = np.tile(ROWS[name].astype(np.float32), (5, 1))
    ks = np.full(5, k, np.int32)
    got = poisoned_logprobs(logits, token, ks, rank_mode=rank_mode)
    assert_columns_match(got, oracle.logprobs(logits, token, ks, rank_mode=rank_mode))


def test_equal_logits_come_in_id_order(isa: str) -> None:
    got = baton_ops.logprobs(
        np.zeros((1, VOCAB), np.float32), np.array([9], np.int32), np.array([64], np.int32)
    )
    np.testing.assert_array_equal(got.topk_token, np.arange(64))
    assert got.rank[0] == VOCAB


def test_a_fully_masked_row_gives_the_lowest_float_for_all(isa: str) -> None:
    got = baton_ops.logprobs(
        np.full((1, 300), -np.inf, np.float32), np.array([299], np.int32), np.array([3], np.int32)
    )
    assert got.logprob[0] == LOWEST
    assert (got.topk_logprob == LOWEST).all()
    assert got.rank[0] == 300


def test_a_nan_ranks_above_infinity_and_is_counted(isa: str) -> None:
    row = np.zeros((1, 300), np.float32)
    row[0, [17, 200]] = np.nan
    row[0, 5] = np.inf
    row[0, 6] = -np.inf
    token = np.array([5], np.int32)
    got = baton_ops.logprobs(row, token, np.array([4], np.int32))
    np.testing.assert_array_equal(got.topk_token, [17, 200, 5, 0])
    assert got.rank[0] == 3
    assert np.isnan(got.topk_logprob).all()
    masked = baton_ops.logprobs(row, token + 1, np.array([0], np.int32))
    assert masked.logprob[0] == LOWEST


def test_nans_of_any_sign_and_payload_tie(isa: str) -> None:
    row = np.zeros((1, 300), np.float32)
    row[0, 7] = np.inf
    ids = [3, 90, 150, 299]
    row.view(np.uint32)[0, ids] = [0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000]
    token, k = np.array([150], np.int32), np.array([5], np.int32)
    got = baton_ops.logprobs(row, token, k)
    np.testing.assert_array_equal(got.topk_token, [*ids, 7])
    assert got.rank[0] == 4
    strict = baton_ops.logprobs(row, token, k, rank_mode=baton_ops.RankMode.ABOVE_PLUS_ONE)
    assert strict.rank[0] == 1


@pytest.mark.parametrize("depth", [8.0, 11.3, 12.0, 13.7, 15.1])
def test_a_long_flat_tail_is_summed_without_drift(
    isa: str, assert_columns_match: Callable[..., None], depth: float
) -> None:
    """Equal terms round alike: an fp32 total would drift by more than the tolerance."""
    row = np.full((1, 262_144), -depth, np.float32)
    row[0, 0] = 0
    token, k = np.array([0], np.int32), np.array([1], np.int32)
    assert_columns_match(baton_ops.logprobs(row, token, k), oracle.logprobs(row, token, k))


def test_top_3_is_the_prefix_of_top_20(isa: str) -> None:
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((6, VOCAB)) * 4).astype(np.float32)
    token = np.zeros(6, np.int32)
    short = baton_ops.logprobs(logits, token, np.full(6, 3, np.int32))
    long = baton_ops.logprobs(logits, token, np.full(6, 20, np.int32))
    for a, b in ((short.topk_token, long.topk_token), (short.topk_logprob, long.topk_logprob)):
        np.testing.assert_array_equal(a.reshape(6, 3), b.reshape(6, 20)[:, :3])
    np.testing.assert_array_equal(short.logprob, long.logprob)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_a_temperature_below_1e_5_means_1(isa: str, temperature: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((1, 700)).astype(np.float32)
    token, k = np.array([3], np.int32), np.array([2], np.int32)
    with np.errstate(divide="ignore"):
        inv_temp = (1 / np.array([temperature], np.float64)).astype(np.float32)
    got = baton_ops.logprobs(logits, token, k, inv_temp=inv_temp)
    plain = baton_ops.logprobs(logits, token, k)
    np.testing.assert_array_equal(got.logprob, plain.logprob)
