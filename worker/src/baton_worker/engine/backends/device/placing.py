"""Matrices on their way to the device: which parts of stored ones make one there, and its scales.

Owns how scales of blocks become scales of rows, so that rows may be cut and joined anywhere, or
stay those of blocks where all parts are whole ones; and the refusal of what is quantised in part.
Knows no layer and no framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.model.checkpoint import CheckpointError, StoredTensor, rounded
from baton_worker.engine.model.files import BLOCK_BYTES
from baton_worker.engine.model.matrices import SCALED
from baton_worker.engine.model.quantisation import Fp8
from baton_worker.engine.model.reading import CheckedReader

_ALL = slice(None)

_BYTES_OF_NUMBER = 20
"""Of the host's memory, for each number while it is multiplied out: its bits, the index that it is
looked up with, and itself twice."""


class Part(NamedTuple):
    """Rows and columns of the matrix of a key, which must have this shape."""

    key: str
    shape: tuple[int, int]
    rows: slice = _ALL
    columns: slice = _ALL


@dataclass(frozen=True, slots=True, eq=False)
class RowScales:
    """float32 scales of each of a matrix's rows, of those of its blocks; or of each block.

    They are repeated while they are written: those of a large mixture are gigabytes.

    Attributes:
        blocks: f32[blocks of rows, groups].
        rows: of the matrix, in order; where scales are of blocks, which blocks.
        block: how many of `rows` share one of `blocks`.
    """

    blocks: npt.NDArray[np.float32]
    rows: range
    block: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, groups]."""
        return len(self.rows), self.blocks.shape[1]

    def write_to(self, out: npt.NDArray[Any], rows: slice) -> None:
        """Write those of these rows to `out` f32."""
        of_rows = np.array(self.rows[rows]) // self.block
        np.take(self.blocks, of_rows, axis=0, out=out, mode="clip")

    def n_stored(self, rows: slice) -> int:
        """None: blocks were read when they were checked."""
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class MultipliedOut:
    """A quantised matrix as floats: each number times its scale, rounded to float32.

    Attributes:
        values: e4m3 numbers `[rows, columns]`.
        scales: of the rows.
        group: how many columns share a scale.
    """

    values: StoredTensor
    scales: RowScales
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns]."""
        return self.values.shape

    def require_float(self) -> None:
        """It is, and its numbers are e4m3: `stored_parts` has seen to it."""

    def write_to(self, out: npt.NDArray[Any], rows: slice) -> None:
        """Write these rows to `out`, as `StoredTensor.write_to` does of float32.

        Raises:
            CheckpointError: as `StoredTensor.e4m3` does, or a number times its scale is not finite,
                or rounds to what is not.
        """
        first, last, _ = rows.indices(self.shape[0])
        step = max(BLOCK_BYTES // (_BYTES_OF_NUMBER * self.shape[1]), 1)
        for start in range(first, last, step):
            block = slice(start, min(start + step, last))
            self._write_block(out[block.start - first : block.stop - first], block)

    def _write_block(self, out: npt.NDArray[Any], rows: slice) -> None:
        numbers = self.values.e4m3(rows)
        scales = np.empty((len(numbers), self.scales.shape[1]), np.float32)
        self.scales.write_to(scales, rows)
        with np.errstate(over="ignore"):
            for group, scale in enumerate(scales.T):
                numbers[:, group * self.group : (group + 1) * self.group] *= scale[:, None]
        np.copyto(out, rounded(numbers) if out.dtype == np.uint16 else numbers)
        self.values.require_finite(out, made=SCALED)

    def n_stored(self, rows: slice = _ALL) -> int:
        """Return how many bytes of the file these rows stand for."""
        return self.values.n_stored(rows)


class ScaledParts(NamedTuple):
    """What makes a quantised matrix: e4m3 numbers, and the scales of their rows, or of their
    blocks.
    """

    values: tuple[StoredTensor, ...]
    scales: tuple[RowScales, ...]

    def multiplied_out(self, group: int) -> tuple[MultipliedOut, ...]:
        """Return them as floats, of scales by row; so many columns share one."""
        parts = zip(self.values, self.scales, strict=True)
        return tuple(MultipliedOut(values, scales, group) for values, scales in parts)


def stored_parts(
    checked: CheckedReader,
    quantisation: Fp8 | None,
    parts: Sequence[Part],
    as_stored: bool = False,
    by_row: bool = False,
) -> tuple[StoredTensor, ...] | ScaledParts:
    """Look matrices up; nothing but scales is read. Those of blocks stay so where each part is of
    whole ones.

    Args:
        as_stored: see `CheckedReader.scales`.
        by_row: each row has scales in any case, as `ScaledParts.multiplied_out` wants them.

    Raises:
        CheckpointError: as `CheckedReader` does, or some are quantised and others are not.
    """
    shapes = {part.key: part.shape for part in parts}
    found = {key: checked.scales(key, shape, as_stored) for key, shape in shapes.items()}
    scales = {key: each for key, each in found.items() if each is not None}
    values = [checked.stored(part.key, part.shape).part(part.rows, part.columns) for part in parts]
    if not scales:
        return tuple(values)
    if len(scales) < len(found):
        plain = next(key for key in found if key not in scales)
        raise CheckpointError(
            f"{next(iter(scales))}, {plain}: the first is quantised and the second is not, "
            "supported is both or none, for they are one matrix on the device"
        )
    assert quantisation is not None, "what has scales is quantised"
    in_blocks = not by_row and all(_is_of_blocks(part, quantisation) for part in parts)
    each = (_row_scales(part, scales[part.key], quantisation, in_blocks) for part in parts)
    return ScaledParts(tuple(values), tuple(each))


def _is_of_blocks(part: Part, quantisation: Fp8) -> bool:
    rows = range(part.shape[0])[part.rows]
    return quantisation.has_blocks(rows.start) and quantisation.has_blocks(len(rows))


def _row_scales(part: Part, scales: StoredTensor, quantisation: Fp8, in_blocks: bool) -> RowScales:
    outputs, inputs = part.shape
    group, of_block = quantisation.group_of(inputs), quantisation.rows
    first, last, _ = part.columns.indices(inputs)
    blocks = scales.float32(columns=slice(first // group, -(-last // group)))
    rows = range(outputs)[part.rows]
    if in_blocks:
        return RowScales(blocks, range(rows.start // of_block, rows.stop // of_block), 1)
    return RowScales(blocks, rows, of_block)
