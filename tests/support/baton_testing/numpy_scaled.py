"""`ScaledKernels` over NumPy, float32 as E: what each must compute, row by row."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.e4m3_numbers import nearest_bits, number
from baton_testing.numpy_device import NumpyDevice, NumpyTensor
from baton_worker.engine.backends.device.scaled_kernels import Beside, Scaled

Array = npt.NDArray[Any]

GROUP = 128
NUMBERS = np.array([number(bits) for bits in range(256)], np.float32)
_APART = 32
_WIDE = NUMBERS.astype(np.float64)


@np.errstate(invalid="ignore", over="ignore")
def quantise(x: Array, out: Scaled) -> None:
    """Write e4m3 bits, and the scale of each group."""
    width = x.shape[1] if out.scales.shape[1] == 1 else GROUP
    for group, first in enumerate(range(0, x.shape[1], width)):
        part = x[:, first : first + width].astype(np.float32)
        scales = np.abs(part).max(axis=1) / np.float32(448.0)
        out.scales[:, group] = scales
        shares = part / np.where(scales == 0.0, np.float32(1.0), scales)[:, None]
        out.values[:, first : first + part.shape[1]] = nearest_bits(shares)
        out.values[scales == 0.0, first : first + part.shape[1]] = 0


def of_rows(weight: Scaled) -> Array:
    """Return the scales of each row of a weight, which may be stored once for each block."""
    return np.repeat(weight.scales, len(weight.values) // len(weight.scales), axis=0)


@np.errstate(invalid="ignore", over="ignore")
def product(x: Scaled, weight: Scaled, out: Array) -> None:
    """Write x[N, I] times weight[O, I]^T.

    Of e4m3 numbers, each a few 512ths up to 448, float64 has every sum of fewer than 2^17 products
    exactly: whatever the order, so that a row's bits do not depend on the others.
    """
    columns = weight.values.shape[1]
    width = columns if x.scales.shape[1] == 1 else GROUP
    rows, numbers, of_weight = _WIDE[x.values], _WIDE[weight.values].T, of_rows(weight)
    total = np.zeros((len(rows), numbers.shape[1]), np.float32)
    for group, first in enumerate(range(0, columns, width)):
        part = np.s_[first : first + width]
        sums = (rows[:, part] @ numbers[part]).astype(np.float32)
        total += sums * x.scales[:, group, None] * of_weight[:, group]
    out[:] = total


def by_expert(x: Scaled, row: Array | None, starts: Array, weight: Scaled, out: Array) -> None:
    """Write of each place the product of its row, or of the row it names, with its expert's."""
    n_experts = len(starts) - 1
    for expert, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        if first == last:
            continue
        own = Scaled(*(part.reshape(n_experts, -1, part.shape[1])[expert] for part in weight))
        of = np.s_[first:last] if row is None else row[first:last]
        product(Scaled(x.values[of], x.scales[of]), own, out[first:last])


def silu_mul(gate_up: Array, out: Array) -> None:
    """Write silu(gate) * up of rows of both.

    Rows lie apart, all alike, so that NumPy goes through each by itself.
    """
    n_rows, width = out.shape
    room = np.empty((2, n_rows, -(-width // _APART) * _APART + _APART))[:, :, :width]
    gate, divisor = room
    gate[:] = gate_up[:, :width]
    with np.errstate(invalid="ignore", over="ignore"):
        np.exp(np.negative(gate, out=divisor), out=divisor)
        divisor += 1.0
        gate /= divisor
        gate *= gate_up[:, width:]
    out[:] = gate


def gated(x: Scaled, weight: Scaled, out: Array) -> None:
    """Write silu(gate) * up of a product."""
    gate_up = np.empty((len(out), 2 * out.shape[1]), np.float32)
    product(x, weight, gate_up)
    silu_mul(gate_up, out)


def gated_by_expert(x: Scaled, row: Array, starts: Array, weight: Scaled, out: Array) -> None:
    """Write silu(gate) * up of each place's product."""
    gate_up = np.empty((len(out), 2 * out.shape[1]), np.float32)
    by_expert(x, row, starts, weight, gate_up)
    silu_mul(gate_up, out)


def break_rows(room: Scaled) -> None:
    """Leave rows that nobody may rely on."""
    room.scales[:] = np.nan


class NumpyScaledKernels:
    """See `scaled_kernels.ScaledKernels`; each call goes on the device's stream."""

    def __init__(self, device: NumpyDevice) -> None:
        self._launch = device.launch

    def quantise(self, x: NumpyTensor, out: Scaled) -> None:
        """See `ScaledKernels.quantise`."""
        self._launch(quantise, x, out)

    def scaled_matmul(self, x: Scaled, weight: Scaled, out: NumpyTensor) -> None:
        """See `ScaledKernels.scaled_matmul`."""
        self._launch(product, x, weight, out)

    def scaled_gate_up_silu(self, x: Scaled, weight: Scaled, out: NumpyTensor) -> None:
        """See `ScaledKernels.scaled_gate_up_silu`."""
        self._launch(gated, x, weight, out)

    def scaled_expert_gate_up_silu(
        self,
        x: Scaled,
        row: NumpyTensor,
        starts: NumpyTensor,
        weight: Scaled,
        out: NumpyTensor,
    ) -> None:
        """See `ScaledKernels.scaled_expert_gate_up_silu`."""
        self._launch(gated_by_expert, x, row, starts, weight, out)

    def quantise_matmul(
        self, x: NumpyTensor, room: Scaled, weight: Scaled, out: NumpyTensor
    ) -> None:
        """See `ScaledKernels.quantise_matmul`; what room holds then is broken."""
        self._launch(quantise, x, room)
        self._launch(product, room, weight, out)
        self._launch(break_rows, room)

    def quantise_gate_up_silu(
        self, x: NumpyTensor, room: Scaled, weight: Scaled, out: NumpyTensor
    ) -> None:
        """See `ScaledKernels.quantise_gate_up_silu`; what room holds then is broken."""
        self._launch(quantise, x, room)
        self._launch(gated, room, weight, out)
        self._launch(break_rows, room)

    def quantise_expert_gate_up_silu(
        self,
        x: NumpyTensor,
        room: Scaled,
        row: NumpyTensor,
        starts: NumpyTensor,
        weight: Scaled,
        out: NumpyTensor,
        beside: Beside | None,
    ) -> None:
        """See `ScaledKernels.quantise_expert_gate_up_silu`; what room holds then is broken."""
        if beside is not None:
            NumpyScaledKernels.quantise_gate_up_silu(self, *beside)
        self._launch(quantise, x, room)
        self._launch(gated_by_expert, room, row, starts, weight, out)
        self._launch(break_rows, room)

    def quantise_expert_matmul(
        self,
        x: NumpyTensor,
        room: Scaled,
        starts: NumpyTensor,
        weight: Scaled,
        out: NumpyTensor,
        beside: Beside | None,
    ) -> None:
        """See `ScaledKernels.quantise_expert_matmul`; what room holds then is broken."""
        if beside is not None:
            NumpyScaledKernels.quantise_matmul(self, *beside)
        self._launch(quantise, x, room)
        self._launch(by_expert, room, None, starts, weight, out)
        self._launch(break_rows, room)
