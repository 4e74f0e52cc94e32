"""A weight matrix `[in, out]`: float32, or e4m3 numbers with float32 scales.

Owns how both are cut, joined and filled up, so that who lays weights out need not ask which it has.
Knows no checkpoint and no product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

SCALED = "times its scales"
"""How a message tells of numbers that `multiplied_out` or its like has made."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrix:
    """A quantised weight: element (i, o) is `values[i, o] * scales[i // group, o]`.

    Its product with a row x is defined by what `e4m3.quantised` makes of x with the same groups:
    for each group, from the first on, the float32 product of both values, times the row's scale,
    times the weight's, added to the sum so far.

    Attributes:
        values: f32[I, O], e4m3 numbers.
        scales: f32[ceil(I / group), O].
        group: how many elements along I have a scale of their own.
    """

    values: Float32Array
    scales: Float32Array
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        """`[I, O]`."""
        return self.values.shape


Matrix = Float32Array | ScaledMatrix


def columns(matrix: Matrix, which: slice | npt.NDArray[np.int64]) -> Matrix:
    """Return these outputs of a matrix."""
    if isinstance(matrix, ScaledMatrix):
        values, scales = matrix.values[:, which], matrix.scales[:, which]
        return ScaledMatrix(values, scales, matrix.group)
    return matrix[:, which]


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Return the outputs of all parts, one behind the other; all of them are of one kind.

    Raises:
        ValueError: they are not, or have other groups.
    """
    scaled = [part for part in parts if isinstance(part, ScaledMatrix)]
    plain = [part for part in parts if not isinstance(part, ScaledMatrix)]
    if not scaled:
        return np.concatenate(plain, axis=1)
    if plain or len({part.group for part in scaled}) > 1:
        raise ValueError("only matrices of one kind can be joined")
    return ScaledMatrix(
        np.concatenate([part.values for part in scaled], axis=1),
        np.concatenate([part.scales for part in scaled], axis=1),
        scaled[0].group,
    )


def multiplied_out(matrix: Matrix) -> Float32Array:
    """Return a quantised matrix's elements, each rounded to float32 once: infinite where that
    overflows, which whoever knows the matrix's key must find.
    """
    if not isinstance(matrix, ScaledMatrix):
        return matrix
    scales = np.repeat(matrix.scales, matrix.group, axis=0)[: len(matrix.values)]
    with np.errstate(over="ignore"):
        return matrix.values * scales


def filled(matrix: Matrix, multiple: int, axis: int) -> Matrix:
    """Return a matrix with zeros behind its inputs (axis 0) or outputs (1), up to a multiple."""
    if isinstance(matrix, ScaledMatrix):
        return filled_scaled(matrix, multiple, axis)
    return filled_array(matrix, multiple, axis)


def filled_scaled(matrix: ScaledMatrix, multiple: int, axis: int) -> ScaledMatrix:
    """Do so for a quantised matrix; what is behind its inputs stays within the last group."""
    values = filled_array(matrix.values, multiple, axis)
    scales = filled_array(matrix.scales, multiple, 1) if axis else matrix.scales
    group = max(matrix.group, len(values)) if len(scales) == 1 else matrix.group
    return ScaledMatrix(values, scales, group)


def filled_array(array: Float32Array, multiple: int, axis: int) -> Float32Array:
    """Do so for any array."""
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    behind = [(0, 0)] * array.ndim
    behind[axis] = (0, missing)
    return np.pad(array, behind)
