"""`TextScorer` refuses what it cannot score: a kernel takes any id, and would score padding too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.backends.device.engine import LoadedModel
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.scorer import TextScorer
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import load_shape

LONGEST = 8


@pytest.fixture(scope="module")
def scorer() -> TextScorer:
    device, model_shape = NumpyDevice(), load_shape(TINY_MODEL)
    checkpoint = open_checkpoint(TINY_MODEL)
    weights = load_device_weights(device, checkpoint, model_shape, "float32", 0)
    return TextScorer(LoadedModel(device, NumpyKernels(device), model_shape, weights), LONGEST)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, 6, 512], r"token 2 is 512, not an id in 0\.\.511"),
        ([-100, 6, 7], r"token 0 is -100, not an id in 0\.\.511"),
        ([5, 1 << 40], r"token 1 is 1099511627776, not an id"),
        ([5.5, 6.0], r"tokens are float64\[2\], not a list of integers"),
        ([5], r"1 tokens, from 2 to 8 can be scored"),
        ([5] * (LONGEST + 1), r"9 tokens, from 2 to 8 can be scored"),
    ],
)
def test_what_is_no_text_of_the_models_is_refused(
    scorer: TextScorer, tokens: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scorer.score(tokens)


def test_any_sequence_of_ids_is_scored_alike(scorer: TextScorer) -> None:
    listed = scorer.score([5, 6, 7])
    assert len(listed.logprob) == 2
    for other in ((5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], np.uint16)):
        np.testing.assert_array_equal(scorer.score(other).logprob, listed.logprob)  # type: ignore[arg-type]
