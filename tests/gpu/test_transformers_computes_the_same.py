"""The implementation that is not ours: transformers' logits and tokens, over its own folders.

It writes each folder - config.json, key names, shapes - so the reading of them is tried too. MiMo
is no class of transformers': the float64 oracle stands for it (tests/engine/serving).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing import numpy_reference as reference
from baton_testing import published_models as published
from baton_worker.engine.backends.device.engine import LoadedModel
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights

TOLERANCE = 1e-4
TOKENS = 1000

FAMILIES = pytest.mark.parametrize("family", published.FAMILIES)
SHAPES = pytest.mark.parametrize("shape", published.SHAPES)

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what it will become


@pytest.fixture(scope="module", params=["numpy", pytest.param("gpu", marks=pytest.mark.gpu)])
def load(request: pytest.FixtureRequest) -> Callable[..., LoadedModel]:
    """`load(folder, dtype)`: a folder's model on NumPy's device, and on a GPU's."""
    pytest.importorskip("torch", reason="PyTorch, which transformers computes with, is absent")
    pytest.importorskip("transformers", reason="transformers, which is compared with, is absent")
    if request.param == "gpu":
        return _on_a_gpu
    return _on_numpy


def _on_numpy(folder: Path, dtype: str = "float32") -> LoadedModel:
    from baton_testing.numpy_device import NumpyDevice
    from baton_testing.numpy_kernels import NumpyKernels

    device = NumpyDevice()
    return published.loaded(folder, device, NumpyKernels(device), dtype)


def _on_a_gpu(folder: Path, dtype: str = "float32") -> LoadedModel:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    from baton_worker.engine.backends.kernels import OpsKernels
    from baton_worker.engine.backends.torch.device import TorchDevice

    device = TorchDevice()
    device.synchronise()
    return published.loaded(folder, device, OpsKernels(device), dtype)


def text(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return found


@FAMILIES
@SHAPES
def test_logits_are_transformers(
    load: Callable[..., LoadedModel], tmp_path: Path, family: str, shape: str
) -> None:
    theirs = published.published_model(family, shape, tmp_path)
    tokens = text(theirs.config.vocab_size, 150)
    wanted = published.published_logits(theirs, tokens)
    found = published.our_logits(load(tmp_path), tokens)
    assert wanted.std() > 0.5, "logits that say nothing prove nothing"
    print(f"{family} {shape}: {np.abs(found - wanted).max():.2g} of {np.abs(wanted).max():.2g}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@FAMILIES
def test_a_thousand_greedy_tokens_are_transformers(
    load: Callable[..., LoadedModel], tmp_path: Path, family: str
) -> None:
    theirs = published.published_model(family, "gqa", tmp_path, seed=1)
    prompt = text(theirs.config.vocab_size, 7, seed=1)
    wanted = published.published_greedy(theirs, prompt, TOKENS)
    assert len(wanted) == TOKENS
    assert published.our_greedy(load(tmp_path), prompt, TOKENS) == wanted


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ernie4_5", "deepseek_v3"])
def test_a_weight_that_is_changed_is_seen(
    load: Callable[..., LoadedModel], tmp_path: Path, family: str
) -> None:
    """The comparison can fail: one bias, or one norm's weight, is off by a little."""
    import torch

    theirs = published.published_model(family, "gqa", tmp_path)
    tokens = text(theirs.config.vocab_size, 40)
    with torch.no_grad():
        attention: Any = theirs.model.layers[1].self_attn
        part = {
            "qwen2": lambda: attention.q_proj.bias,
            "deepseek_v3": lambda: attention.kv_a_layernorm.weight,
        }.get(family, lambda: theirs.model.norm.weight)()
        part[3] += 0.02
    wanted = published.published_logits(theirs, tokens)
    assert np.abs(published.our_logits(load(tmp_path), tokens) - wanted).max() > TOLERANCE


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_draft_layer_under_deepseeks_names_is_transformers(
    load: Callable[..., LoadedModel], tmp_path: Path, family: str
) -> None:
    """The float64 oracle, to which both engines' drafts are held, against a second opinion."""
    import transformers

    published.published_model(family, "gqa", tmp_path)
    published.add_draft_layer(tmp_path, load_shape(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    shape = load_shape(tmp_path)
    weights = load_weights(tmp_path, shape)
    for length in (2, 3, 17, 40):
        tokens = text(shape.vocab_size, length, seed=length)
        hidden = reference.forward(weights, shape, tokens[:-1]).hidden
        ours = reference.mtp_forward(weights, shape, hidden, tokens[1:]).logits[-1]
        wanted = published.published_draft(theirs, tokens)
        assert wanted.std() > 0.5, "logits that say nothing prove nothing"
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=TOLERANCE)
