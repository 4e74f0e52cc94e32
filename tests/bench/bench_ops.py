"""Time of the logprob op per row on the CPU, against NumPy and Paddle in the same process.

All three get the same fp32 logits and return the sampled logprob, its rank and the top k. Ranks and
ids must agree before anything is timed; logprobs are compared with fp64. The three take turns, so
that a busy machine is busy for all. Paddle computes logsumexp, topk and a count; its log_softmax is
not used, because it is quadratic in the vocabulary on the CPU.

Run: python tests/bench/bench_ops.py [--threads 1] [--json PATH]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import baton_ops
from baton_ops import oracle

VOCABS = (512, 32_000, 103_424)
TOKENS = (1, 8, 64)
TOP_K = (0, 5, 20)

Columns = tuple[np.ndarray, ...]
Call = Callable[[], Columns]


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds per row over `calls` calls, and the largest error of a sampled logprob."""

    median: float
    lowest: float
    calls: int
    max_error: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape and what each implementation took."""

    vocab: int
    tokens: int
    k: int
    baton: Measured
    numpy: Measured
    paddle: Measured


def baton_call(logits: np.ndarray, token: np.ndarray, k: int) -> Call:
    ks = np.full(len(token), k, np.int32)
    places, out = baton_ops.offsets(ks), baton_ops.logprobs(logits, token, ks)

    def call() -> Columns:
        baton_ops.logprobs_into(logits, token, ks, out, offsets=places)
        return out

    return call


def numpy_call(logits: np.ndarray, token: np.ndarray, k: int) -> Call:
    rows = np.arange(len(token))

    def call() -> Columns:
        highest = logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits - highest).sum(axis=1, keepdims=True)) + highest
        sampled = logits[rows, token][:, None]
        rank = (logits >= sampled).sum(axis=1)
        if k == 0:
            return (sampled - log_sum).ravel(), rank
        ids = np.argpartition(logits, -k, axis=1)[:, -k:]
        values = np.take_along_axis(logits, ids, axis=1)
        order = np.lexsort((ids, -values), axis=1)
        values = np.take_along_axis(values, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
        return (sampled - log_sum).ravel(), rank, ids.ravel(), (values - log_sum).ravel()

    return call


def paddle_call(paddle: Any, logits: np.ndarray, token: np.ndarray, k: int) -> Call:
    x, index = paddle.to_tensor(logits), paddle.to_tensor(token[:, None].astype(np.int64))

    def call() -> Columns:
        log_sum = paddle.logsumexp(x, axis=1, keepdim=True)
        sampled = paddle.take_along_axis(x, index, axis=1)
        rank = (x >= sampled).sum(axis=1)
        first = ((sampled - log_sum).numpy().ravel(), rank.numpy())
        if k == 0:
            return first
        values, ids = paddle.topk(x, k, axis=1)
        return (*first, ids.numpy().ravel(), (values - log_sum).numpy().ravel())

    return call


def logprob_errors(logits: np.ndarray, token: np.ndarray, results: list[Columns]) -> list[float]:
    """Return each result's largest error against fp64.

    Raises:
        AssertionError: ranks or ids differ, or a logprob is off by more than 1e-3.
    """
    rows = zip(logits.astype(np.float64), token, strict=True)
    want = [oracle.log_softmax(row, 1.0)[sampled] for row, sampled in rows]
    errors = [float(np.abs(result[0] - want).max()) for result in results]
    for result, error in zip(results, errors, strict=True):
        assert error < 1e-3, error
        for ours, theirs in zip(results[0][1:3], result[1:3], strict=False):
            np.testing.assert_array_equal(ours, theirs)
    return errors


def take_turns(calls: list[Call], budget_seconds: float) -> list[list[float]]:
    """Return the seconds of each call, in rounds until the budget is spent, three at least."""
    seconds: list[list[float]] = [[] for _ in calls]
    while len(seconds[0]) < 3 or sum(map(sum, seconds)) < budget_seconds:
        for call, spent in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    return seconds


def measure_cell(paddle: Any, shape: tuple[int, int, int], budget_seconds: float) -> Cell:
    vocab, tokens, k = shape
    rng = np.random.default_rng(vocab + tokens)
    logits = (rng.standard_normal((tokens, vocab)) * 4).astype(np.float32)
    token = rng.integers(0, vocab, tokens).astype(np.int32)
    calls = [
        baton_call(logits, token, k),
        numpy_call(logits, token, k),
        paddle_call(paddle, logits, token, k),
    ]
    errors = logprob_errors(logits, token, [call() for call in calls])
    scale = 1e6 / tokens
    measured = [
        Measured(statistics.median(s) * scale, min(s) * scale, len(s), error)
        for s, error in zip(take_turns(calls, budget_seconds), errors, strict=True)
    ]
    return Cell(vocab, tokens, k, *measured)


def print_table(cells: list[Cell]) -> None:
    print(f"{'':15} {'us/row (median)':^29} {'ratio to baton':^16} {'largest error':^20}")
    names = ("baton", "numpy", "paddle")
    print(f"{'V':>7} {'T':>3} {'k':>3} {'baton':>9} {'numpy':>9} {'paddle':>9}", end="")
    print(f" {'numpy':>8} {'paddle':>7} {'baton':>7} {'numpy':>6} {'paddle':>6}")
    for cell in cells:
        results = [getattr(cell, name) for name in names]
        print(f"{cell.vocab:7} {cell.tokens:3} {cell.k:3}", end="")
        print("".join(f" {r.median:9.2f}" for r in results), end=" ")
        print("".join(f" {r.median / cell.baton.median:7.1f}" for r in results[1:]), end=" ")
        print("".join(f" {r.max_error:6.0e}" for r in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="for baton and for Paddle")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--budget-seconds", type=float, default=0.6, help="per shape")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Paddle's import asks for build tools
        import paddle
    baton_ops.set_threads(options.threads)
    shapes = itertools.product(VOCABS, TOKENS, TOP_K)
    cells = [measure_cell(paddle, shape, options.budget_seconds) for shape in shapes]
    print(f"{baton_ops.isa()}, {options.threads} thread(s), fp32, medians")
    print_table(cells)
    if options.json:
        setting = {
            "isa": baton_ops.isa(),
            "threads": options.threads,
            "machine": platform.machine(),
        }
        record = setting | {"unit": "us/row", "cells": [asdict(cell) for cell in cells]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
