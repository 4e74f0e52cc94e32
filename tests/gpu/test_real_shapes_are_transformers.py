"""The implementation that is not ours, in the shapes that are published: two layers of each family.

In float32 the logits are transformers'; in bfloat16 they are as near to its float32 as its own are.
Random weights; folders as transformers writes them, of up to 12 GB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import published_models as published

TOLERANCE = 1e-4
TOKENS = 192
NO_FARTHER = 1.05
"""Of the errors' root mean squares, ours over transformers': a few roundings more or less."""

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


class Logits(NamedTuple):
    """f32[TOKENS, V] of transformers and ours, by what they compute in."""

    theirs: npt.NDArray[np.float32]
    theirs_bfloat16: npt.NDArray[np.float32]
    ours: npt.NDArray[np.float32]
    ours_bfloat16: npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=[*published.REAL])
def logits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Logits:
    """A family's, all of the same weights and text."""
    torch = pytest.importorskip("torch", reason="PyTorch, which transformers computes with")
    pytest.importorskip("transformers", reason="transformers, which is compared with, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    folder = tmp_path_factory.mktemp("model")
    model = published.published_two_layers(request.param, folder, "cuda")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, TOKENS).tolist()
    theirs = published.published_logits(model, tokens)
    del model
    torch.cuda.empty_cache()
    rounded = published.published_logits(published.published_in_bfloat16(folder, "cuda"), tokens)
    torch.cuda.empty_cache()
    return Logits(theirs, rounded, *(_ours(folder, dtype, tokens) for dtype in DTYPES))


DTYPES = ("float32", "bfloat16")


def _ours(folder: Path, dtype: str, tokens: list[int]) -> npt.NDArray[np.float32]:
    import torch

    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.torch.device import TorchDevice

    device = TorchDevice()
    device.synchronise()
    model: Any = published.loaded(folder, device, OpsKernels(device), dtype)
    found = published.our_logits(model, tokens)
    del model
    torch.cuda.empty_cache()
    return found


def rms(error: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(error.astype(np.float64) ** 2)))


def test_float32_logits_are_transformers(logits: Logits) -> None:
    assert logits.theirs.std() > 0.5, "logits that say nothing prove nothing"
    print(f"float32: {np.abs(logits.ours - logits.theirs).max():.2g} at most")
    np.testing.assert_allclose(logits.ours, logits.theirs, rtol=0, atol=TOLERANCE)


def test_bfloat16_logits_are_no_farther_from_float32_than_transformers(logits: Logits) -> None:
    theirs = rms(logits.theirs_bfloat16 - logits.theirs)
    ours = rms(logits.ours_bfloat16 - logits.theirs)
    print(f"bfloat16: {ours:.4f}, transformers {theirs:.4f}")
    assert theirs > 0, "an error that is none is no measure"
    assert ours <= NO_FARTHER * theirs
