"""What kernels do with FP8: quantise rows, and multiply them with weights that are stored so.

Owns the protocol. Numbers are e4m3, a byte each; a scale is of a group of columns, of each 128 or
of the whole row: how many scales a row has says which. In groups of 128 a weight's may be of each
128 rows together: how many rows of scales there are says which. What a product is,
`matrices.ScaledMatrix` defines. Letters are `seam`'s and `expert_kernels`'; G is the number of
groups. Knows no layer and not where the memory comes from.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton_worker.engine.backends.device.operands import Tensor


class Scaled(NamedTuple):
    """Rows, of activations or of a weight: values u8[N, I], e4m3; scales f32[N, G], of a weight
    maybe f32[N / 128, G], of blocks that no expert's matrix nor its gates' end is within.
    """

    values: Tensor
    scales: Tensor


class Beside(NamedTuple):
    """What `ScaledKernels.quantise_matmul` is given, of a weight as large as an expert's: what all
    tokens share, which is computed beside their own experts. Of N tokens x has N rows. In one
    launch with the experts' product where `out`, and of the second one x and room too, lies right
    behind that one's.
    """

    x: Tensor
    room: Scaled
    weight: Scaled
    out: Tensor


Weight = Tensor | Scaled
"""A matrix [O, I], of E or quantised."""


class ScaledKernels(Protocol):
    """A row's bits depend on the row alone, as with `Kernels`; weights are read early."""

    def quantise(self, x: Tensor, out: Scaled) -> None:
        """out [N, I] = x E[N, I] as `e4m3.quantised` does; `x`'s rows may be strided."""

    def scaled_matmul(self, x: Scaled, weight: Scaled, out: Tensor) -> None:
        """out E[N, O] = x [N, I] times weight [O, I]: group after group, the sum of a group's
        products times the row's scale and the weight's, added in fp32; rounded once. How exact a
        group's sum is depends on the kernels, and on E, but not on N (`baton_ops.scaled`).
        """

    def scaled_gate_up_silu(self, x: Scaled, weight: Scaled, out: Tensor) -> None:
        """out E[N, I] = `Kernels.gate_up_silu` of what `scaled_matmul` makes of weight [2 I, H]."""

    def scaled_expert_gate_up_silu(
        self, x: Scaled, row: Tensor, starts: Tensor, weight: Scaled, out: Tensor
    ) -> None:
        """out E[N * C, I]: of each place `scaled_gate_up_silu` of the row of x [N, H] that row
        i32[N * C] names, and of its expert's rows of `weight` [X * 2 I, H]. `starts` is read early:
        `quantise` stands between what wrote it and this call.
        """

    def quantise_expert_matmul(
        self,
        x: Tensor,
        room: Scaled,
        starts: Tensor,
        weight: Scaled,
        out: Tensor,
        beside: Beside | None,
    ) -> None:
        """out E[N * C, H]: of each place `quantise_matmul` of its row of x E[N * C, I] and of its
        expert's rows of `weight` [X * H, I]; and `quantise_matmul` of `beside`. Called behind
        `scaled_expert_gate_up_silu`, of one token behind `quantise_expert_gate_up_silu`, with the
        same `starts`, which it reads early.
        """

    def quantise_matmul(self, x: Tensor, room: Scaled, weight: Scaled, out: Tensor) -> None:
        """Do `quantise` of x E[N, I] to `room`, and `scaled_matmul` of that. What room holds then
        nobody may rely on: a single row need not go there.
        """

    def quantise_gate_up_silu(self, x: Tensor, room: Scaled, weight: Scaled, out: Tensor) -> None:
        """The same with `scaled_gate_up_silu`."""

    def quantise_expert_gate_up_silu(
        self,
        x: Tensor,
        room: Scaled,
        row: Tensor,
        starts: Tensor,
        weight: Scaled,
        out: Tensor,
        beside: Beside | None,
    ) -> None:
        """The same with `scaled_expert_gate_up_silu`; and `quantise_gate_up_silu` of `beside`,
        whose x and room are these.
        """
