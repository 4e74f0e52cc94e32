"""The loader and the oracle agree with implementations that are not ours.

The numbers are logits for the same random checkpoints and tokens: of PaddleFormers 1.2.0
(Apache-2.0; eager attention, float32, Paddle 3.3.1 on the CPU), all 50 x 96 within 3.2e-6 of ours,
and for Qwen3 of mlx-lm 0.32.2 (MIT; float32, mlx 0.32.4 on the CPU), all within 4.7e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing.numpy_reference import forward
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights


@pytest.mark.parametrize(
    ("family", "head_dim", "is_tied", "first_row", "last_row"),
    [
        (
            "ernie4_5",
            8,
            True,
            [-1.85364, -0.78221, 0.40404, 0.12234],
            [0.46757, 0.49154, 1.52116, -0.22956, 1.85325, -1.16844, 0.54697, -0.56661],
        ),
        (
            "llama",
            8,
            False,
            [-1.60511, 0.14154, 0.03796, 2.29011],
            [-2.18085, -1.52039, 1.78731, -0.02797, 0.7457, 1.26311, 0.50646, 0.47218],
        ),
        (
            "qwen3",
            12,
            True,
            [0.254, 0.20395, 0.98318, 0.08418],
            [-0.99549, 0.38195, 0.67233, -1.36908, -0.91289, 0.20607, 0.56199, 2.04693],
        ),
        (
            "qwen3",
            12,
            False,
            [-0.55673, -0.18089, -0.14555, 1.16733],
            [-2.08193, 0.64952, 0.05542, 0.52839, 2.47519, 0.39851, 0.73576, 0.11622],
        ),
    ],
)
def test_logits_are_those_of_other_implementations(
    make_checkpoint: Callable[..., Any],
    family: str,
    head_dim: int,
    is_tied: bool,
    first_row: list[float],
    last_row: list[float],
) -> None:
    made = make_checkpoint(
        family=family,
        seed=5,
        num_nextn_predict_layers=0,
        head_dim=head_dim,
        tie_word_embeddings=is_tied,
        rope_theta=5000.0,
    )
    shape = load_shape(made.path)
    ids = np.random.default_rng(1).integers(0, 96, 50).tolist()
    logits = forward(load_weights(made.path, shape), shape, ids).logits
    np.testing.assert_allclose(logits[0, :4], first_row, rtol=0, atol=2e-5)
    np.testing.assert_allclose(logits[-1, :8], last_row, rtol=0, atol=2e-5)
