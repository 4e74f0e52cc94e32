"""What does not fit an op of FP8 is refused by name; what fits comes as far as the driver.

Needs a library with CUDA code, and no driver: see `baton_testing.stub_device`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton_ops import scaled
from baton_testing.stub_device import FIT, StubDevice, has_cuda_code

pytestmark = pytest.mark.skipif(
    not has_cuda_code(), reason="needs baton_ops with CUDA code on a machine without a GPU"
)

ROWS, COLUMNS, OUTPUTS = 5, 300, 40


def tensor(dtype: Any, *shape: int) -> Any:
    return StubDevice().empty(shape, dtype)


def quantise(**changed: Any) -> None:
    given = {
        "x": tensor("bfloat16", ROWS, COLUMNS),
        "values": tensor("uint8", ROWS, COLUMNS),
        "scales": tensor("float32", ROWS, 3),
    } | changed
    scaled.quantise_rows_into(*given.values())


def multiply(**changed: Any) -> None:
    given = {
        "x": tensor("uint8", ROWS, COLUMNS),
        "x_scales": tensor("float32", ROWS, 3),
        "weight": tensor("uint8", OUTPUTS, COLUMNS),
        "weight_scales": tensor("float32", OUTPUTS, 3),
        "out": tensor("bfloat16", ROWS, OUTPUTS),
    } | changed
    scaled.scaled_matmul_into(*given.values())


EXPERTS = 3


def gate(**changed: Any) -> None:
    given = {
        "x": tensor("uint8", ROWS, COLUMNS),
        "x_scales": tensor("float32", ROWS, 3),
        "weight": tensor("uint8", 2 * OUTPUTS, COLUMNS),
        "weight_scales": tensor("float32", 2 * OUTPUTS, 3),
        "out": tensor("bfloat16", ROWS, OUTPUTS),
    } | changed
    scaled.scaled_gate_up_silu_into(*given.values())


def multiply_experts(**changed: Any) -> None:
    given = {
        "x": tensor("uint8", ROWS, COLUMNS),
        "x_scales": tensor("float32", ROWS, 3),
        "starts": tensor("int32", EXPERTS + 1),
        "weight": tensor("uint8", EXPERTS * OUTPUTS, COLUMNS),
        "weight_scales": tensor("float32", EXPERTS * OUTPUTS, 3),
        "out": tensor("bfloat16", ROWS, OUTPUTS),
    } | changed
    scaled.scaled_expert_matmul_into(*given.values())


def gate_experts(**changed: Any) -> None:
    """Of two tokens, whose rows are taken by several experts."""
    given = {
        "x": tensor("uint8", 2, COLUMNS),
        "x_scales": tensor("float32", 2, 3),
        "row": tensor("int32", ROWS),
        "starts": tensor("int32", EXPERTS + 1),
        "weight": tensor("uint8", EXPERTS * 2 * OUTPUTS, COLUMNS),
        "weight_scales": tensor("float32", EXPERTS * 2 * OUTPUTS, 3),
        "out": tensor("bfloat16", ROWS, OUTPUTS),
    } | changed
    scaled.scaled_expert_gate_up_silu_into(*given.values())


def both(**changed: Any) -> None:
    given = {
        "plain": tensor("bfloat16", ROWS, COLUMNS),
        "x": tensor("uint8", ROWS, COLUMNS),
        "x_scales": tensor("float32", ROWS, 3),
        "weight": tensor("uint8", OUTPUTS, COLUMNS),
        "weight_scales": tensor("float32", OUTPUTS, 3),
        "out": tensor("bfloat16", ROWS, OUTPUTS),
    } | changed
    scaled.quantise_matmul_into(*given.values())


def both_of_experts(**changed: Any) -> None:
    given = {
        "plain": tensor("bfloat16", 1, COLUMNS),
        "x": tensor("uint8", 1, COLUMNS),
        "x_scales": tensor("float32", 1, 3),
        "row": tensor("int32", ROWS),
        "starts": tensor("int32", EXPERTS + 1),
        "weight": tensor("uint8", EXPERTS * 2 * OUTPUTS, COLUMNS),
        "weight_scales": tensor("float32", EXPERTS * 2 * OUTPUTS, 3),
        "out": tensor("bfloat16", ROWS, OUTPUTS),
    } | changed
    scaled.quantise_expert_gate_up_silu_into(*given.values())


def both_of_experts_rows(**changed: Any) -> None:
    given = {
        "plain": tensor("bfloat16", ROWS, COLUMNS),
        "x": tensor("uint8", ROWS, COLUMNS),
        "x_scales": tensor("float32", ROWS, 3),
        "starts": tensor("int32", EXPERTS + 1),
        "weight": tensor("uint8", EXPERTS * OUTPUTS, COLUMNS),
        "weight_scales": tensor("float32", EXPERTS * OUTPUTS, 3),
        "out": tensor("bfloat16", ROWS, OUTPUTS),
    } | changed
    scaled.quantise_expert_matmul_into(*given.values())


def beside_experts(**changed: Any) -> None:
    """Their second product, and that of what all share."""
    given = {
        "beside_plain": tensor("bfloat16", 1, COLUMNS),
        "beside_x": tensor("uint8", 1, COLUMNS),
        "beside_x_scales": tensor("float32", 1, 3),
        "beside_weight": tensor("uint8", OUTPUTS, COLUMNS),
        "beside_weight_scales": tensor("float32", OUTPUTS, 3),
        "beside_out": tensor("bfloat16", 1, OUTPUTS),
    } | changed
    both_of_experts_rows(beside=tuple(given.values()))


def beside_no_rows(**changed: Any) -> None:
    """Where no row has an expert nothing is launched, and what all share would not be either."""
    row = tensor("bfloat16", 1, COLUMNS)
    room = tensor("uint8", 1, COLUMNS), tensor("float32", 1, 3)
    weight = tensor("uint8", OUTPUTS, COLUMNS), tensor("float32", OUTPUTS, 3)
    none = {
        "plain": tensor("bfloat16", 0, COLUMNS),
        "x": tensor("uint8", 0, COLUMNS),
        "x_scales": tensor("float32", 0, 3),
        "out": tensor("bfloat16", 0, OUTPUTS),
        "beside": (row, *room, *weight, tensor("bfloat16", 1, OUTPUTS)),
    }
    both_of_experts_rows(**none, **changed)


WHOLE = {
    "x_scales": tensor("float32", ROWS, 1),
    "weight_scales": tensor("float32", OUTPUTS, 1),
}


def in_blocks(n_blocks: int, outputs: int = 128, columns: int = COLUMNS) -> dict[str, Any]:
    """Return what `gate_experts` is given of so many blocks' scales."""
    return {
        "x": tensor("uint8", 2, columns),
        "weight": tensor("uint8", EXPERTS * 2 * outputs, columns),
        "weight_scales": tensor("float32", n_blocks, 3),
        "out": tensor("bfloat16", ROWS, outputs),
    }


def gate_experts_in_blocks(**changed: Any) -> None:
    gate_experts(**in_blocks(EXPERTS * 2) | changed)


def beside_blocks(n_blocks: int, n_beside: int) -> None:
    """Experts' second product, and what all share, by scales of blocks or rows."""
    beside_experts_of = {
        "plain": tensor("bfloat16", ROWS, COLUMNS),
        "weight": tensor("uint8", EXPERTS * 128, COLUMNS),
        "weight_scales": tensor("float32", n_blocks, 3),
        "out": tensor("bfloat16", ROWS, 128),
        "beside": (
            tensor("bfloat16", 1, COLUMNS),
            tensor("uint8", 1, COLUMNS),
            tensor("float32", 1, 3),
            tensor("uint8", 128, COLUMNS),
            tensor("float32", n_beside, 3),
            tensor("bfloat16", 1, 128),
        ),
    }
    both_of_experts_rows(**beside_experts_of)


@pytest.mark.parametrize(
    ("op", "changed"),
    [
        (quantise, {}),
        (quantise, {"x": tensor("float32", ROWS, COLUMNS)}),
        (quantise, {"scales": tensor("float32", ROWS, 1)}),
        (multiply, {}),
        (multiply, WHOLE),
        (multiply, {"out": tensor("float32", ROWS, OUTPUTS)}),
        (gate, {}),
        (multiply_experts, {}),
        (gate_experts, {}),
        (both, {}),
        (both_of_experts, {}),
        (both_of_experts_rows, {}),
        (beside_experts, {}),
        (gate_experts_in_blocks, {}),
        (gate_experts_in_blocks, {"weight_scales": tensor("float32", EXPERTS * 2 * 128, 3)}),
        (beside_blocks, {"n_blocks": EXPERTS, "n_beside": 1}),
        (beside_blocks, {"n_blocks": EXPERTS * 128, "n_beside": 128}),
    ],
)
def test_what_fits_comes_to_the_driver(op: Any, changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=FIT):
        op(**changed)


@pytest.mark.parametrize(
    ("op", "changed", "message"),
    [
        (quantise, {"x": tensor("uint8", ROWS, COLUMNS)}, "x must be bfloat16 or float32"),
        (quantise, {"values": tensor("float32", ROWS, COLUMNS)}, "values"),
        (quantise, {"values": tensor("uint8", ROWS, 299)}, "values.shape[1]"),
        (quantise, {"values": tensor("uint8", ROWS, 300 + 2 * 320)}, "values.shape[1]"),
        (multiply, {"x": tensor("uint8", ROWS, 300 + 2 * 320)}, "x_scales.shape[1]"),
        (quantise, {"scales": tensor("float32", ROWS, 2)}, "scales.shape[1] must be 1, or 3 for"),
        (quantise, {"scales": tensor("float32", 4, 3)}, "scales.shape[0]"),
        (quantise, {"scales": tensor("float32", ROWS)}, "scales"),
        (quantise, {"x": tensor("float32", ROWS, 0)}, "x.shape[1] must be in [1,"),
        (multiply, {"x": tensor("bfloat16", ROWS, COLUMNS)}, "x"),
        (multiply, {"x_scales": tensor("float32", ROWS, 4)}, "x_scales.shape[1] must be 1, or 3"),
        (multiply, {"weight": tensor("uint8", OUTPUTS, 299)}, "weight.shape[1]"),
        (multiply, {"weight_scales": tensor("float32", OUTPUTS, 1)}, "weight_scales.shape[1]"),
        (multiply, {"weight_scales": tensor("float32", 39, 3)}, "weight_scales.shape[0]"),
        (multiply, {"out": tensor("bfloat16", ROWS, 39)}, "weight.shape[0]"),
        (multiply, {"out": tensor("bfloat16", 4, OUTPUTS)}, "out.shape[0]"),
        (gate, {"weight": tensor("uint8", OUTPUTS, COLUMNS)}, "weight.shape[0]"),
        (multiply_experts, {"starts": tensor("int32", 3)}, "weight.shape[0]"),
        (multiply_experts, {"starts": tensor("int32", 1)}, "starts.shape[0]"),
        (multiply_experts, {"starts": tensor("int64", 4)}, "starts"),
        (multiply_experts, {"starts": tensor("int32", 514)}, "experts[0] must be in [1, 512]"),
        (gate_experts, {"row": tensor("int32", 4)}, "row.shape[0]"),
        (gate_experts, {"weight_scales": tensor("float32", 5, 3)}, "weight_scales.shape[0]"),
        (multiply, {"out": tensor("uint8", ROWS, OUTPUTS)}, "out must be bfloat16 or float32"),
        (both, {"plain": tensor("bfloat16", 4, COLUMNS)}, "x.shape[0] must be 4"),
        (both, {"plain": tensor("bfloat16", ROWS, 299)}, "plain.shape[1]"),
        (both, {"plain": tensor("float32", ROWS, COLUMNS)}, "plain"),
        (both, {"x": tensor("uint8", 4, COLUMNS)}, "x.shape[0] must be 5"),
        (both, {"x": tensor("uint8", ROWS, 316)}, "x.shape[1] must be 300"),
        (both, {"x_scales": tensor("float32", 4, 3)}, "x_scales.shape[0] must be 5"),
        (both_of_experts, {"x": tensor("uint8", 2, COLUMNS)}, "x.shape[0] must be 1"),
        (both_of_experts, {"plain": tensor("bfloat16", 1, 299)}, "plain.shape[1] must be 300"),
        (both_of_experts_rows, {"x": tensor("uint8", 1, COLUMNS)}, "x.shape[0] must be 5"),
        (both_of_experts_rows, {"starts": tensor("int32", 3)}, "weight.shape[0]"),
        (beside_experts, {"beside_x": None}, "beside_x"),
        (beside_experts, {"beside_plain": None}, "beside_x must be None where beside_plain is"),
        (beside_no_rows, {}, "out.shape[0] must be in [1, "),
        (beside_experts, {"beside_plain": tensor("float32", 1, COLUMNS)}, "beside_plain"),
        (beside_experts, {"beside_plain": tensor("bfloat16", 0, COLUMNS)}, "beside_plain.shape[0]"),
        (beside_experts, {"beside_plain": tensor("bfloat16", 2, COLUMNS)}, "beside_x.shape[0]"),
        (beside_experts, {"beside_weight": tensor("uint8", 80, COLUMNS)}, "beside_weight.shape[0]"),
        (beside_experts, {"beside_out": tensor("bfloat16", 1, 39)}, "beside_out.shape[1]"),
        (
            gate_experts_in_blocks,
            {"weight_scales": tensor("float32", 5, 3)},
            "weight_scales.shape[0] must be 768, or 6 for a scale for each 128 rows, got 5",
        ),
        (gate_experts, in_blocks(EXPERTS * 3, 192), "weight_scales.shape[0] must be 1152, got 9"),
        (
            gate_experts_in_blocks,
            {"x_scales": tensor("float32", 2, 1), "weight_scales": tensor("float32", 6, 1)},
            "weight_scales.shape[0] must be 768, got 6",
        ),
        (
            beside_blocks,
            {"n_blocks": EXPERTS, "n_beside": 128},
            "beside_weight_scales.shape[0] must be 1",
        ),
        (
            beside_blocks,
            {"n_blocks": EXPERTS * 128, "n_beside": 1},
            "beside_weight_scales.shape[0] must be 128",
        ),
    ],
)
def test_what_does_not_fit_is_named(op: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        op(**changed)
