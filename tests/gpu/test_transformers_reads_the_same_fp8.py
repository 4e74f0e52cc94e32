"""FP8 checkpoints as transformers reads them, whose kernels for their products need a GPU.

So what it makes of the files is compared where it runs everywhere: the weights, which it multiplies
out without a GPU. Activations are then quantised in front of each of its projections by the
published formula in plain PyTorch (groups of 128, their largest / 448), whose float8 is not ours.
What `compressed-tensors` says runs there whole, activations too, where that package is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import numpy_reference as reference
from baton_testing import published_models as published
from baton_testing.fp8_folder import Scheme, quantise_folder
from baton_worker.engine.model.matrices import Matrix, ScaledMatrix
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import LayerWeights, MlpWeights, Weights, load_weights

TOLERANCE = 1e-4
STEP = 0.5
"""What activations that float32 and float64 round apart change a logit by, at most."""
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "vocab_size": 199,
}
"""Multiples of 128, which transformers wants where it multiplies out."""
EXPERTS = {"moe_intermediate_size": 128}
KEPT = ("model.layers.1.mlp.down_proj",)

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns that there is no GPU


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`folder(family, **how)`: one that transformers wrote, quantised afterwards."""
    pytest.importorskip("torch", reason="PyTorch, which transformers computes with, is absent")
    pytest.importorskip("transformers", reason="transformers, which is compared with, is absent")

    def made(family: str, **how: Any) -> Path:
        fields = published.FAMILIES[family].fields
        more = EXPERTS if "moe_intermediate_size" in fields else {}
        monkeypatch.setitem(published.SHAPES, "blocks", SIZES)
        monkeypatch.setitem(
            published.FAMILIES,
            family,
            dataclasses.replace(published.FAMILIES[family], fields=fields | more),
        )
        published.published_model(family, "blocks", tmp_path)
        quantise_folder(tmp_path, **how)
        return tmp_path

    return made


def read_by_transformers(folder: Path) -> Any:
    import torch
    import transformers

    if torch.cuda.is_available():
        pytest.skip("with a GPU transformers keeps the weights in FP8")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def text(vocab_size: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(0).integers(0, vocab_size, count).tolist()
    return found


def multiplied_out(weights: Weights) -> Weights:
    """Return a model whose weights are what the quantised ones stand for."""

    def value(weight: Matrix) -> npt.NDArray[np.float32]:
        if not isinstance(weight, ScaledMatrix):
            return weight
        return weight.values * np.repeat(weight.scales, weight.group, axis=0)[: weight.shape[0]]

    def mlp(of: MlpWeights) -> MlpWeights:
        return MlpWeights(value(of.gate_up), value(of.down))

    def layer(of: LayerWeights) -> LayerWeights:
        mixture = of.mixture
        if mixture is not None:
            experts = tuple(mlp(each) for each in mixture.experts)
            mixture = dataclasses.replace(mixture, experts=experts)
        return dataclasses.replace(
            of, qkv=value(of.qkv), o=value(of.o), mlp=of.mlp and mlp(of.mlp), mixture=mixture
        )

    return dataclasses.replace(weights, layers=tuple(layer(each) for each in weights.layers))


@pytest.mark.parametrize(
    ("family", "kept"),
    [("llama", ()), ("qwen2", KEPT), ("qwen3", ()), ("qwen3_moe", ()), ("glm4_moe", ())],
)
def test_weights_are_transformers(
    folder: Callable[..., Path], family: str, kept: tuple[str, ...]
) -> None:
    path = folder(family, kept=kept)
    theirs, shape = read_by_transformers(path), load_shape(path)
    tokens = text(shape.vocab_size, 60)
    wanted = published.published_logits(theirs, tokens)
    weights = load_weights(path, shape)
    found = reference.forward(multiplied_out(weights), shape, tokens).logits
    assert wanted.std() > 0.5, "logits that say nothing prove nothing"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    quantised = reference.forward(weights, shape, tokens).logits
    assert np.abs(quantised - wanted).max() > 100 * TOLERANCE, "activations are not quantised here"


def quantise_inputs(model: Any) -> int:
    """Put the published quantisation of activations in front of each projection of its layers."""
    import torch

    def before(module: Any, fed: tuple[Any, ...]) -> tuple[Any, ...]:
        groups = fed[0].unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True) / 448.0
        rounded = (groups / scale).to(torch.float8_e4m3fn).to(fed[0].dtype)
        return ((rounded * scale).flatten(-2), *fed[1:])

    projections = [module for name, module in model.named_modules() if name.endswith("_proj")]
    for module in projections:
        module.register_forward_pre_hook(before)
    return len(projections)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_products_are_the_published_formula_over_transformers_weights(
    folder: Callable[..., Path], family: str
) -> None:
    path = folder(family)
    theirs, shape = read_by_transformers(path), load_shape(path)
    assert quantise_inputs(theirs) == 7 * shape.n_layers
    tokens = text(shape.vocab_size, 60)
    wanted = published.published_logits(theirs, tokens)
    found = reference.forward(load_weights(path, shape), shape, tokens).logits
    assert_near(found, wanted, family)


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_compressed_tensors_computes_the_same(
    folder: Callable[..., Path], family: str, scheme: Scheme
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is absent")
    path = folder(family, scheme=scheme)
    theirs, shape = read_by_transformers(path), load_shape(path)
    tokens = text(shape.vocab_size, 60)
    wanted = published.published_logits(theirs, tokens)
    weights = load_weights(path, shape)
    assert_near(reference.forward(weights, shape, tokens).logits, wanted, f"{family} {scheme}")
    plain = reference.forward(multiplied_out(weights), shape, tokens).logits
    assert np.median(np.abs(plain - wanted)) > 100 * TOLERANCE, "their activations are quantised"


def assert_near(found: npt.NDArray[np.float64], wanted: npt.NDArray[np.float32], of: str) -> None:
    misses = np.abs(found - wanted)
    print(f"{of}: median {np.median(misses):.2g}, largest {misses.max():.2g}")
    assert np.median(misses) < TOLERANCE
    assert misses.max() < STEP
