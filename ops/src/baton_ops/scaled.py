"""FP8 on CUDA: rows to e4m3 with scales, and their product with a weight that is stored so.

Numbers are e4m3 (448 at most, no infinity), held as uint8. A scale f32 is of a group of columns: of
each 128, the last maybe fewer, or of the whole row; how many scales a row has says which. In groups
of 128 a weight's scales may be of each 128 rows together, f32[*/128, G]: how many rows of scales
there are says which, and bits are those of the same scales for each row. Then 128 divides O, so
that no block has rows of two experts, or of gates and ups.

How exact a product is depends on what it is of, never on N, and a row's bits on that row alone. On
Hopper, of bfloat16 outputs on 16 bytes whose rows are multiples of 8 elements apart (as one row's
is in any case), O a multiple of 8, K of 16, x and weights on 16 bytes, products are the tensor
cores' own of e4m3 numbers, which keep fewer bits of a range's sum than fp32 has. Else numbers
become float16, which is exact, and a range's sum is fp32. A weight holds no NaN: who loads one
refuses it. NaN of x stays NaN. Owns the Python form of these ops. Knows no model.

Shapes: N rows, K columns, G groups, O outputs, X experts. E is bfloat16 or float32. Every function
raises TypeError or ValueError where a dtype, shape or device is wrong; the message names it.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_ops._library import Tensor, launch

_NOTHING = (None,) * 6
"""In the place of what `quantise_matmul_into` takes."""


def quantise_rows_into(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write values uint8[N, K] and scales f32[N, G] of x E[N, K].

    A group's scale is its largest / 448, its numbers are x / scale, rounded to the nearest, even on
    ties. A group of nothing has scale 0; a NaN or an infinity breaks its group and no other.
    """
    launch("cuda_quantise_rows")(x, values, scales)


def scaled_matmul_into(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor
) -> None:
    """Write out E[N, O]: x uint8[N, K] times uint8[O, K]^T, scales f32[*, G].

    Group after group from the first on, the sum of a group's products, in ranges of 128 in
    ascending order, is multiplied by the row's scale and the weight's and added, in fp32; rounded
    to E once. By the tensor cores' own products a range is summed in steps of 32, both scales are
    multiplied first, and a group is scaled and added in one rounding. By float16 it is summed in
    steps of 16, and multiplied by the row's scale, then by the weight's, and added.
    """
    launch("cuda_scaled_matmul")(x, x_scales, weight, weight_scales, out)


def scaled_gate_up_silu_into(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor
) -> None:
    """Write out E[N, O] = silu(gate) * up, [gate, up] what `scaled_matmul_into` makes, of E, of
    weight uint8[2 O, K].
    """
    launch("cuda_scaled_gate_up_silu")(x, x_scales, weight, weight_scales, out)


def scaled_expert_matmul_into(
    x: Tensor,
    x_scales: Tensor,
    starts: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
) -> None:
    """Write out E[N, O]: of rows starts i32[X + 1][e] to starts[e + 1] - 1 what
    `scaled_matmul_into` makes of them and of rows e * O to e * O + O - 1 of weight uint8[X * O, K].
    `starts` are read early: they are there when `scaled_expert_gate_up_silu_into`, or any kernel
    that lets none start before it has waited, comes between them and this.
    """
    launch("cuda_scaled_expert_matmul")(x, x_scales, starts, weight, weight_scales, out)


def scaled_expert_gate_up_silu_into(
    x: Tensor,
    x_scales: Tensor,
    row: Tensor,
    starts: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
) -> None:
    """Write out E[N, O] of weight uint8[X * 2 O, K], as `scaled_expert_matmul_into` groups rows and
    `scaled_gate_up_silu_into` makes them; row n is row[n] i32[N] of x uint8[*, K]. `starts` are
    read as early: they are there when `quantise_rows_into` comes between them and this.
    """
    launch("cuda_scaled_expert_gate_up_silu")(x, x_scales, row, starts, weight, weight_scales, out)


def quantise_matmul_into(
    plain: Tensor,
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
) -> None:
    """Write to out what `quantise_rows_into` of plain E[N, K] to x, x_scales, and
    `scaled_matmul_into` behind it write there. What x, x_scales hold then is not said: of a single
    row a kernel for Hopper does without them.
    """
    launch("cuda_quantise_matmul")(plain, x, x_scales, weight, weight_scales, out)


def quantise_gate_up_silu_into(
    plain: Tensor,
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
) -> None:
    """As `quantise_matmul_into`, of `scaled_gate_up_silu_into`."""
    launch("cuda_quantise_gate_up_silu")(plain, x, x_scales, weight, weight_scales, out)


def quantise_expert_gate_up_silu_into(
    plain: Tensor,
    x: Tensor,
    x_scales: Tensor,
    row: Tensor,
    starts: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    beside: Sequence[Tensor] | None = None,
) -> None:
    """As `quantise_matmul_into`, of `scaled_expert_gate_up_silu_into`; and what
    `quantise_gate_up_silu_into` does with `beside`, of a row or more and a weight as large as an
    expert's. In one launch: of a single row of both, the same one; and of as many rows as plain
    has, which are these, if out's are right behind `out`. Then out has a row at least, and each of
    its rows is an expert's.
    """
    run = launch("cuda_quantise_expert_gate_up_silu")
    run(plain, x, x_scales, row, starts, weight, weight_scales, out, *(beside or _NOTHING))


def quantise_expert_matmul_into(
    plain: Tensor,
    x: Tensor,
    x_scales: Tensor,
    starts: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    beside: Sequence[Tensor] | None = None,
) -> None:
    """As `quantise_matmul_into`, of `scaled_expert_matmul_into`, which reads `starts` as early: of
    up to eight rows a kernel for Hopper does without x, x_scales. And what `quantise_matmul_into`
    does with `beside`, as above; in one launch too where rows, their room and their output are
    right behind plain, x, x_scales and out.
    """
    run = launch("cuda_quantise_expert_matmul")
    run(plain, x, x_scales, starts, weight, weight_scales, out, *(beside or _NOTHING))
