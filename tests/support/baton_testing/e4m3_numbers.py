"""All e4m3 numbers, from the format's definition, and the nearest of them to any number.

Shares no code with the engine: tests hold its rounding and its products against this.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

NAN_BITS = (0x7F, 0xFF)


def number(bits: int) -> float:
    """Return the number of one byte: (-1)^s 2^(e - 7) (1 + m / 8), of e = 0 (-1)^s 2^-6 m / 8."""
    if bits in NAN_BITS:
        return math.nan
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = Fraction(mantissa, 8) + (1 if exponent else 0)
    size *= Fraction(2) ** (max(exponent, 1) - 7)
    return math.copysign(float(size), -1.0 if sign else 1.0)


POSITIVE = np.array([number(bits) for bits in range(0x7F)])
"""Ascending; the bits of each are its place."""
_HALFWAY = (POSITIVE[1:] + POSITIVE[:-1]) / 2
"""From each to the next, which float64 has exactly."""


def nearest_bits(x: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    """Return the bits of the e4m3 number nearest to each x, even ones on ties; beyond 448 448's."""
    size = np.minimum(np.abs(x), POSITIVE[-1]).astype(np.float64)
    place = np.searchsorted(_HALFWAY, size)
    is_tie = _HALFWAY.take(place, mode="clip") == size
    place += is_tie & (place % 2 == 1)
    bits = np.where(np.isnan(x), 0x7F, place) | np.where(np.signbit(x), 0x80, 0)
    return bits.astype(np.uint8)


def nearest(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the e4m3 number nearest to each x, as `nearest_bits` does."""
    signed = np.concatenate([POSITIVE, [np.nan], -POSITIVE, [np.nan]])
    return signed[nearest_bits(x)]
