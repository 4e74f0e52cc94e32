"""FP8 numbers as checkpoints and activations have them: e4m3, without infinities.

A sign, 4 bits of exponent (bias 7), 3 of mantissa: 0x7F and 0xFF are NaN, the largest number is
448, the smallest 2^-9 (Micikevicius et al., arXiv 2209.05433, table 1). Owns what its bits mean and
how float32 becomes it. Knows no weights and no framework. Every step here is a correctly rounded
operation on one element or a maximum, so results depend on nothing but the row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LARGEST = np.float32(448.0)

_MANTISSA_BITS = 3
_LOWEST_STEP = -9
"""Numbers below 2^-6 are multiples of 2^-9."""


class Quantised(NamedTuple):
    """Rows x: `values[n, k] * scales[n, k // group]` is near to `x[n, k]`.

    Attributes:
        values: f32[N, K], e4m3 numbers.
        scales: f32[N, ceil(K / group)].
    """

    values: npt.NDArray[np.float32]
    scales: npt.NDArray[np.float32]


def decoded(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the numbers that e4m3 bits stand for, exactly."""
    numbers: npt.NDArray[np.float32] = _numbers()[bits]
    return numbers


def rounded(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the e4m3 numbers nearest to x, ties to even; beyond 448 is 448, NaN stays NaN."""
    clipped = np.clip(x, -LARGEST, LARGEST)
    _, exponent = np.frexp(clipped)
    step = np.maximum(exponent - (_MANTISSA_BITS + 1), _LOWEST_STEP)
    nearest: npt.NDArray[np.float32] = np.ldexp(np.rint(np.ldexp(clipped, -step)), step)
    return nearest


def quantised(x: npt.NDArray[np.float32], group: int) -> Quantised:
    """Quantise rows f32[N, K], with a scale for each `group` elements: their largest / 448.

    The last group may be shorter. Where a scale is 0, the values are. A NaN or an infinity breaks
    the scale of its group and so the row, which whoever looks at rows must find.
    """
    count = -(-x.shape[1] // group)
    behind = count * group - x.shape[1]
    padded = np.pad(x, ((0, 0), (0, behind))) if behind else x
    groups = padded.reshape(len(x), count, group)
    with np.errstate(over="ignore", invalid="ignore"):
        scales: npt.NDArray[np.float32] = np.abs(groups).max(axis=2) / LARGEST
        divisors = np.where(scales == 0.0, np.float32(1.0), scales).astype(np.float32)
        values = rounded(groups / divisors[:, :, None]).reshape(len(x), -1)
    values = np.where(np.repeat(scales == 0.0, group, axis=1), np.float32(0.0), values)
    return Quantised(values[:, : x.shape[1]], scales)


def _numbers() -> npt.NDArray[np.float32]:
    """Return f32[256], by bits."""
    bits = np.arange(256)
    exponent, mantissa = bits >> _MANTISSA_BITS & 15, bits & 7
    size = np.where(exponent == 0, mantissa, 8 + mantissa)
    numbers = np.ldexp(size.astype(np.float32), np.maximum(exponent, 1) - 10)
    numbers[(bits & 0x7F) == 0x7F] = np.nan
    signed: npt.NDArray[np.float32] = np.where(bits >= 0x80, -numbers, numbers)
    return signed
