"""Rotary position embeddings as tables: the angle of each pair of a head at each position.

Owns the frequencies, scaled as a model was trained or extended, and the tables that engines read.
Knows no config.json and no framework. All of it is float64 until a table is rounded to float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_POSITIONS = (1 << 31) - 1
"""What positions are counted in has 32 bits."""

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: long waves are stretched, short ones stay, those between are blended.

    Attributes:
        factor: by which waves are stretched that are longer than `original_positions` /
            `low_freq_factor`.
        high_freq_factor: waves shorter than `original_positions` / this stay as they are.
        original_positions: the context before it was extended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by: nothing."""
        return 1.0

    def frequencies(self, plain: Float64Array, theta: float) -> Float64Array:
        """Return the radians a position of each pair, of those without scaling."""
        turns = self.original_positions * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return np.asarray(plain * (kept + (1.0 - kept) / self.factor))


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's (arXiv 2309.00071): pairs that turn seldom within the original context are stretched.

    Attributes:
        factor: by which pairs are stretched that turn less than `beta_slow` times within
            `original_positions`; those that turn more than `beta_fast` times stay.
        attention_factor: what cosines and sines are multiplied by, hence scores by its square.
        truncate: the pairs between which the blend runs are whole numbers.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool = True

    def frequencies(self, plain: Float64Array, theta: float) -> Float64Array:
        """Return the radians a position of each pair, of those without scaling."""
        first, last = (
            self._pair(self.beta_fast, theta, plain),
            self._pair(self.beta_slow, theta, plain),
        )
        if self.truncate:
            first, last = float(math.floor(first)), float(math.ceil(last))
        first, last = max(first, 0.0), min(last, 2.0 * len(plain) - 1.0)
        span = last - first or 0.001
        stretched = np.clip((np.arange(len(plain)) - first) / span, 0.0, 1.0)
        return np.asarray(plain * (1.0 - stretched + stretched / self.factor))

    def _pair(self, turns: float, theta: float, plain: Float64Array) -> float:
        """Return the pair, of a head with so many, that turns so often in the original context."""
        wave = self.original_positions / (turns * 2 * math.pi)
        return len(plain) * math.log(wave) / math.log(theta)


RopeScaling = Llama3Scaling | YarnScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float64Array:
    """Return f64[head_dim / 2]: the radians that each pair turns a position."""
    half = head_dim // 2
    plain = theta ** (-np.arange(half, dtype=np.float64) / half)
    return plain if scaling is None else scaling.frequencies(plain, theta)


def rope_tables(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    n_positions: int,
    rotated_size: int = 0,
) -> tuple[Float32Array, Float32Array]:
    """Return cosines and sines f32[n_positions, head_dim / 2], times the scaling's factor.

    Where `rotated_size` elements of a head rotate and not all of them (0), the pairs of the others
    turn by nothing; they are the last ones, see `stretches`.
    """
    size = rotated_size or head_dim
    angle = np.arange(n_positions, dtype=np.float64)[:, None] * frequencies(size, theta, scaling)
    factor = 1.0 if scaling is None else scaling.attention_factor
    still = ((0, 0), (0, (head_dim - size) // 2))
    cos = np.pad(np.cos(angle) * factor, still, constant_values=1.0)
    sin = np.pad(np.sin(angle) * factor, still)
    return cos.astype(np.float32), sin.astype(np.float32)


def stretches(head_dim: int, rotated_size: int) -> tuple[slice, ...]:
    """Return the stretches of a head, of which the first `rotated_size` elements (0: all) rotate,
    in an order in which pairs are half a head apart: those that rotate before the others.

    Queries and keys that are put in this order alike have the scores they had.
    """
    size = rotated_size or head_dim
    if size == head_dim:
        return (slice(0, head_dim),)
    half, still = size // 2, (head_dim - size) // 2
    return (
        slice(0, half),
        slice(size, size + still),
        slice(half, size),
        slice(size + still, head_dim),
    )
