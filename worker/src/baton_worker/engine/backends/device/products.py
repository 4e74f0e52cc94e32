"""Products of activations with a layer's weights, whichever kind these are: E, or FP8.

Owns the choice of kernels and where quantised activations lie. Of FP8 rows are quantised once for
all products that take them, but a single one by each: where its kernel takes that as it is, no
launch waits for another. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton_worker.engine.backends.device.expert_kernels import Routes
from baton_worker.engine.backends.device.scaled_kernels import Beside, Scaled, Weight
from baton_worker.engine.backends.device.seam import Device, Kernels, Tensor
from baton_worker.engine.model.quantisation import Fp8
from baton_worker.engine.model.shape import ModelShape


class Room(NamedTuple):
    """Memory for quantised rows: values, scales u8[*]."""

    values: Tensor
    scales: Tensor


class ScaledSpace(NamedTuple):
    """Memory of quantised activations, for as long as what multiplies them runs.

    Attributes:
        rows: of flat tokens.
        pairs: of what experts made of them, and behind that of what all tokens share, if it is as
            wide; None for models without.
    """

    rows: Room
    pairs: Room | None


def scaled_space(device: Device, model_shape: ModelShape, count: int) -> ScaledSpace | None:
    """Return memory for so many flat tokens; None for models that are not quantised."""
    quantisation, experts = model_shape.quantisation, model_shape.experts
    if quantisation is None:
        return None
    pairs = None
    if experts is not None:
        width = experts.intermediate_size
        each = experts.chosen + int(experts.shared_size == width)
        pairs = _room(device, quantisation, count * each, width)
    return ScaledSpace(_room(device, quantisation, count, _widest(model_shape)), pairs)


def _widest(model_shape: ModelShape) -> int:
    """Return the most columns of a token's row; a draft layer's projection takes two states."""
    hidden, experts = model_shape.hidden_size, model_shape.experts
    shared = experts.shared_size if experts else 0
    queries = model_shape.mla.q_rank if model_shape.mla else 0
    return max(2 * hidden, model_shape.o_size, model_shape.intermediate_size, shared, queries)


def _room(device: Device, quantisation: Fp8, count: int, width: int) -> Room:
    """Return memory for so many rows of so many columns at most."""
    n_groups = -(-width // quantisation.group_of(width))
    return Room(
        device.empty((count * width,), "uint8"), device.empty((count * n_groups * 4,), "uint8")
    )


def is_single(x: Tensor) -> bool:
    """Whether x E[N, *] is a single row, which each product that takes it quantises."""
    return bool(x.shape[0] == 1)


class Products:
    """Launches products. Of the memory that each is given, what it needs must be there."""

    def __init__(self, device: Device, kernels: Kernels) -> None:
        self._device = device
        self._kernels = kernels

    def quantised(
        self, x: Tensor, room: ScaledSpace | None, *weights: Weight | None
    ) -> Scaled | None:
        """Quantise rows if one of the weights is FP8, as all that are want it; else None. Of a
        single row that is room for it: whoever multiplies it quantises it.
        """
        scaled = self.room_of(x, room, *weights)
        if scaled is not None and not is_single(x):
            self._kernels.quantise(x, scaled)
        return scaled

    def room_of(
        self, x: Tensor, room: ScaledSpace | None, *weights: Weight | None
    ) -> Scaled | None:
        """Return room for rows if one of the weights is FP8, of which nobody has written any."""
        for weight in weights:
            if isinstance(weight, Scaled):
                return self._room(x.shape, weight, room.rows if room else None)
        return None

    def room_behind(
        self, pairs: Tensor, x: Tensor, room: ScaledSpace | None, weight: Scaled
    ) -> Scaled:
        """Return room for rows right behind that of `pairs`, whose experts' products take it."""
        n_pairs, columns = pairs.shape
        stop = n_pairs + x.shape[0]
        whole = self._room((stop, columns), weight, room.pairs if room else None)
        return Scaled(*(self._device.rows(each, n_pairs, stop) for each in whole))

    def matmul(self, x: Tensor, weight: Weight, out: Tensor, room: ScaledSpace | None) -> None:
        """out E[N, O] = x E[N, I] @ weight [O, I]^T."""
        scaled = self.quantised(x, room, weight)
        if scaled is None:
            self._kernels.matmul(x, weight, out)
        elif is_single(x):
            self._kernels.quantise_matmul(x, scaled, weight, out)
        else:
            self._kernels.scaled_matmul(scaled, weight, out)

    def gate_up_silu(self, x: Tensor, scaled: Scaled | None, weight: Weight, out: Tensor) -> None:
        """out E[N, I] = `Kernels.gate_up_silu` of x E[N, H], which is `scaled` if quantised."""
        if isinstance(weight, Scaled):
            assert scaled is not None, "whoever has the weight has had its rows quantised"
            if is_single(x):
                self._kernels.quantise_gate_up_silu(x, scaled, weight, out)
            else:
                self._kernels.scaled_gate_up_silu(scaled, weight, out)
        else:
            self._kernels.gate_up_silu(x, weight, out)

    def expert_gate_up_silu(
        self,
        x: Tensor,
        scaled: Scaled | None,
        routes: Routes,
        weight: Weight,
        spread: Tensor,
        out: Tensor,
        known: bool,
        beside: Beside | None,
    ) -> None:
        """out E[N * C, I]: `gate_up_silu` of each place's row. `spread` E[N * C, H] gets the rows
        themselves where they are not quantised. `known`: see `ExpertKernels.expert_gate_up_silu`.
        `beside`: of FP8; then `scaled` is room, whether x is a single row or not.
        """
        if isinstance(weight, Scaled):
            assert scaled is not None, "whoever has the weight has had its rows quantised"
            row, starts = routes.row, routes.starts
            if is_single(x) or beside is not None:
                run = self._kernels.quantise_expert_gate_up_silu
                run(x, scaled, row, starts, weight, out, beside)
            else:
                self._kernels.scaled_expert_gate_up_silu(scaled, row, starts, weight, out)
            return
        if x.shape[0] > 1:  # a single row is what every place has
            self._kernels.gather(x, routes.row, spread)
            x = spread
        self._kernels.expert_gate_up_silu(x, routes.starts, weight, out, known)

    def expert_matmul(
        self,
        x: Tensor,
        routes: Routes,
        weight: Weight,
        out: Tensor,
        room: ScaledSpace | None,
        beside: Beside | None,
    ) -> None:
        """out E[N * C, H]: `matmul` of each place's row of x E[N * C, I]. `beside`: as above."""
        if isinstance(weight, Scaled):
            scaled = self._room(x.shape, weight, room.pairs if room else None)
            self._kernels.quantise_expert_matmul(x, scaled, routes.starts, weight, out, beside)
        else:
            self._kernels.expert_matmul(x, routes.starts, weight, out)

    def _room(self, shape: Sequence[int], weight: Scaled, room: Room | None) -> Scaled:
        """Return room for so many rows and columns, of which nobody has written any."""
        assert room is not None, "memory was made for another shape"
        rows, columns = shape
        n_scales = (rows, weight.scales.shape[1])
        return Scaled(
            self._device.view(room.values, 0, (rows, columns), "uint8"),
            self._device.view(room.scales, 0, n_scales, "float32"),
        )
