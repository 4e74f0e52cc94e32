"""Every unusable argument is refused by name, index and value, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import baton_ops

N, V = 4, 50


def _good() -> dict[str, Any]:
    k = np.array([2, -1, 0, 3], np.int32)
    out = baton_ops.LogprobColumns(
        np.full(3, 7, np.float32),
        np.full(3, 7, np.int32),
        np.full(5, 7, np.int32),
        np.full(5, 7, np.float32),
    )
    return {
        "logits": np.zeros((N, V), np.float32),
        "token": np.zeros(4, np.int32),
        "k": k,
        "row_index": np.arange(4, dtype=np.int32),
        "inv_temp": np.ones(4, np.float32),
        "offsets": baton_ops.offsets(k),
        "out": out,
    }


def _call(arguments: dict[str, Any]) -> None:
    rest = dict(arguments)
    positional = [rest.pop(name) for name in ("logits", "token", "k", "out")]
    baton_ops.logprobs_into(*positional, **rest)


def _set(array: np.ndarray, index: int, value: float) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def test_the_good_arguments_are_good() -> None:
    arguments = _good()
    _call(arguments)
    assert (arguments["out"].rank == V).all()


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("token", 2, V, r"token\[2\] must be in \[0, 49\], got 50"),
        ("token", 0, -1, r"token\[0\] must be in \[0, 49\], got -1"),
        ("row_index", 3, N, r"row_index\[3\] must be in \[0, 3\], got 4"),
        ("row_index", 0, -2, r"row_index\[0\] must be in \[0, 3\], got -2"),
        ("k", 1, -2, r"k\[1\] must be in \[-1, 64\], got -2"),
        ("k", 1, 65, r"k\[1\] must be in \[-1, 64\], got 65"),
        ("k", 3, 51, r"k\[3\] must be at most V = 50, got 51"),
        ("k", 3, 4, r"offsets.topk\[4\] must be in \[6, 6\], got 5"),
        ("inv_temp", 2, 0.0, r"inv_temp\[2\] must be above 0, got 0"),
        ("inv_temp", 0, -1.0, r"inv_temp\[0\] must be above 0, got -1"),
        ("inv_temp", 0, np.nan, r"inv_temp\[0\] must be above 0, got -?nan"),
    ],
)
def test_a_value_out_of_range(name: str, index: int, value: float, message: str) -> None:
    arguments = _good()
    arguments[name] = _set(arguments[name], index, value)
    with pytest.raises(ValueError, match=message):
        _call(arguments)
    assert all((column == 7).all() for column in arguments["out"])


def test_values_of_a_row_without_logprobs_are_not_looked_at() -> None:
    arguments = _good()
    arguments["token"] = _set(arguments["token"], 1, -1)
    arguments["row_index"] = _set(arguments["row_index"], 1, -1)
    _call(arguments)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("logits", np.zeros((N, V)), TypeError, "logits must be float32, float16 or bfloat16"),
        ("logits", np.zeros(V, np.float32), ValueError, "logits must have 2 dimensions, got 1"),
        ("logits", np.zeros((N, 2 * V), np.float32)[:, ::2], ValueError, "logits must have unit"),
        ("logits", np.zeros((V, N), np.float32).T, ValueError, "logits must have unit stride"),
        ("logits", np.zeros((N, V), np.float32)[::-1], ValueError, "logits must have a row stride"),
        ("logits", [[0.0]], TypeError, "logits must be a tensor"),
        ("token", np.zeros(4, np.int64), TypeError, "token must be int32, got int64"),
        ("token", np.zeros((4, 1), np.int32), ValueError, "token must have 1 dim"),
        ("token", np.zeros(8, np.int32)[::2], ValueError, "token must be contiguous"),
        ("k", np.zeros(3, np.int32), ValueError, r"k.shape\[0\] must be 4, got 3"),
        ("row_index", np.zeros(4, np.int16), TypeError, "row_index must be int32, got int16"),
        ("row_index", None, ValueError, "token has 5 rows but logits.shape"),
        ("inv_temp", np.ones(4), TypeError, "inv_temp must be float32, got float64"),
        ("inv_temp", np.ones(5, np.float32), ValueError, r"inv_temp.shape\[0\] must be 4, got 5"),
        ("num_rows", np.array([5], np.int32), ValueError, r"num_rows\[0\] must be in \[0, 4\]"),
        ("num_rows", np.array([-1], np.int32), ValueError, r"num_rows\[0\] must be in \[0, 4\]"),
        ("rank_mode", 2, ValueError, "rank_mode must be 0 .AT_LEAST. or 1"),
        ("typo", 1, TypeError, "no option typo"),
    ],
)
def test_a_wrong_kind(name: str, value: Any, error: type[Exception], message: str) -> None:
    arguments = _good() | {name: value}
    if message.startswith("token has 5 rows"):
        arguments["token"] = np.zeros(5, np.int32)
        arguments["k"] = np.zeros(5, np.int32)
        arguments["inv_temp"] = None
    with pytest.raises(error, match=message):
        _call(arguments)
    assert all((column == 7).all() for column in arguments["out"])


@pytest.mark.parametrize("field", ["logprob", "rank", "topk_token", "topk_logprob"])
def test_an_output_that_is_too_short_or_of_another_dtype(field: str) -> None:
    arguments = _good()
    column = getattr(arguments["out"], field)
    short = arguments | {"out": arguments["out"]._replace(**{field: column[:-1].copy()})}
    with pytest.raises(ValueError, match=rf"out.{field}.shape\[0\] must be at least \d, got \d"):
        _call(short)
    wide = arguments | {"out": arguments["out"]._replace(**{field: column.astype(np.float64)})}
    with pytest.raises(TypeError, match=rf"out.{field} must be \w+, got float64"):
        _call(wide)


@pytest.mark.parametrize(("field", "at"), [("row", 0), ("row", 2), ("topk", 1), ("topk", 4)])
def test_offsets_that_do_not_fit_k_cannot_direct_a_write(field: str, at: int) -> None:
    arguments = _good()
    places = arguments["offsets"]
    wrong = places._replace(**{field: _set(getattr(places, field), at, 1_000_000)})
    with pytest.raises(ValueError, match=rf"offsets.{field}\[{at}\] must be in"):
        _call(arguments | {"offsets": wrong})


def test_a_sum_of_k_beyond_int32() -> None:
    with pytest.raises(ValueError, match="sum of k must fit int32"):
        baton_ops.offsets(np.full(2, 2**30, np.int32))
