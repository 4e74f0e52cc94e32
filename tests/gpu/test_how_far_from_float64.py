"""Logprobs against a float64 oracle: bfloat16's own error, stated, and 5e-5 with float32."""

from __future__ import annotations

import pytest

from baton_testing.engine_bench import LoadedModel
from baton_testing.exactness import devices, oracle
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights

FLOAT32, BFLOAT16 = 5e-5, 0.15
"""Largest errors of a logprob. bfloat16's is that of its rounding between kernels: on NumPy, where
every tensor is rounded so and every sum is float32, it is 0.08."""


def model(round_weights: bool) -> LoadedModel:
    """Return the tiny model as float64 computes it, its weights rounded first if they are there."""
    shape = load_shape(TINY_MODEL)
    weights = load_weights(TINY_MODEL, shape)
    return LoadedModel(shape, oracle.rounded(weights) if round_weights else weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", devices.of_model("tiny"))
def test_logprobs_are_as_far_from_float64_as_the_dtype(name: str) -> None:
    is_bfloat16 = devices.KNOWN[name].dtype == "bfloat16"
    with devices.subject(name) as subject:
        few = subject.tried(asks=22, tokens=24, longest=90)
        found = oracle.errors(few, model(is_bfloat16), n_draft=2, max_running=16)
    print(f"{name}: {found}")
    assert found.largest <= (BFLOAT16 if is_bfloat16 else FLOAT32)
    assert found.tokens == 22 * 24
