"""FP8 models on either engine: the oracle's answers, and the same bits whatever happens around.

Rounding to e4m3 is a step: where float32 and float64 fall on two sides of it, one activation
differs by a sixteenth, and what follows by what that is worth. So most of what the engine says is
the oracle's within float32's own error, and all of it within the error of a step or two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import numpy_reference as reference
from baton_testing.engine_bench import LoadedModel
from baton_testing.fp8_folder import Scheme, quantise_folder
from baton_worker.config import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SpeculativeConfig,
)
from baton_worker.engine.build import build_engine
from baton_worker.engine.model.matrices import Matrix, ScaledMatrix
from baton_worker.engine.model.weights import ExpertWeights, LayerWeights, MlpWeights
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import NO_DRAFTS, DraftSources

Array = npt.NDArray[np.float32]

ENGINES = ("paddle", "device")
TOLERANCE = 5e-5
STEP = 0.25
"""What a few activations on the other side of a step change a logprob by, at most."""
TOKENS = 14

SIZES = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 40}
"""Two groups along each shared dimension, the second of them short."""
RANKS = {"head_dim": None, "kv_lora_rank": 132}
CASES: dict[str, tuple[str, Scheme, dict[str, Any]]] = {
    "qwen3-blocks": ("qwen3", "fp8", {"num_nextn_predict_layers": 0}),
    "qwen2-channels": ("qwen2", "channel", {"num_nextn_predict_layers": 0}),
    "ernie-interleaved": ("ernie4_5", "fp8", {}),
    "mimo-drafts": ("mimo", "fp8", {"tie_word_embeddings": False}),
    "qwen3-experts": ("qwen3_moe", "fp8", {}),
    "glm-experts": ("glm4_moe", "channel", {}),
    "deepseek-rows": ("deepseek_v3", "fp8", RANKS | {"q_lora_rank": 136}),
    "deepseek-channels": ("deepseek_v3", "channel", RANKS | {"q_lora_rank": None}),
}
HAVE_DRAFT_LAYERS = (
    "ernie-interleaved",
    "mimo-drafts",
    "glm-experts",
    "deepseek-rows",
    "deepseek-channels",
)


@pytest.fixture
def make(make_checkpoint: Callable[..., Any]) -> Callable[..., Path]:
    """`make(case, **config)`: a folder in FP8, draft layers and their projection too."""

    def made(case: str, **config: Any) -> Path:
        family, scheme, fields = CASES[case]
        folder: Path = make_checkpoint(family, **(SIZES | fields | config)).path
        quantise_folder(folder, scheme, with_drafts=True)
        return folder

    return made


def drafting(case: str, k: int) -> dict[str, Any]:
    if not k:
        return {"n_draft": 0, "use_mtp": False, "drafts": NO_DRAFTS}
    if case in HAVE_DRAFT_LAYERS:
        return {"n_draft": k, "use_mtp": True, "drafts": DraftSources()}
    return {"n_draft": k, "use_mtp": False, "drafts": DraftSources(0, NgramSizes(1, 3))}


def served(bench: Any, hand_over: Any, decode: Any, prompts: Any) -> tuple[list[Any], int]:
    """Return each request's stream, and how many drafts were proposed."""
    keys = [
        bench.submit(
            n,
            prompt,
            temperature=0.8 * (n % 2),
            seed=n,
            max_tokens=TOKENS,
            logprobs_k=2,
            hand_over=decode is not bench,
        )
        for n, prompt in enumerate(prompts)
    ]
    if decode is not bench:
        hand_over(bench, decode, bench.handoffs())
    results = decode.drain()
    proposed = sum(int(result.stats.proposed_by_position.sum()) for result in results)
    return [decode.reader[key] for key in keys], proposed


def bits(streams: list[Any]) -> list[Any]:
    return [(s.tokens, s.logprobs, s.ranks, s.topk) for s in streams]


@pytest.fixture
def prompts(make_prompts: Any) -> Any:
    return [prompt * 2 for prompt in make_prompts(6, vocab_size=96, longest=16)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_said_is_the_oracles_with_any_k_and_in_a_pair(
    make: Any, load_model: Any, make_bench: Any, hand_over: Any, prompts: Any, case: str
) -> None:
    model = load_model(make(case))
    options = {"block_size": 8, "max_running": 1} | drafting(case, 0)
    bench = make_bench(model, **options)
    alone, _ = served(bench, hand_over, bench, prompts)
    misses = [
        miss
        for stream, prompt in zip(alone, prompts, strict=True)
        for miss in off(model, prompt, stream)
    ]
    print(f"{case}: median {np.median(misses):.2g}, largest {max(misses):.2g}")
    assert np.median(misses) < TOLERANCE
    assert max(misses) < STEP
    for k, is_pair in ((0, True), (1, False), (3, True)):
        options = {"block_size": 8, "prefill_tokens": 19} | drafting(case, k)
        bench = decode = make_bench(model, **options)
        if is_pair:
            decode = make_bench(model, reader=bench.reader, **options)
        said, proposed = served(bench, hand_over, decode, prompts)
        assert bits(said) == bits(alone), (k, is_pair)
        assert (proposed > 0) == (k > 0), "the cell must do what it is named for"


def off(model: LoadedModel, prompt: Any, stream: Any) -> list[float]:
    """Return by how much each logprob misses the oracle's; greedy ones are nearly its best."""
    expected = model.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
    assert len(stream.tokens) == TOKENS
    chosen = expected[np.arange(TOKENS), stream.tokens]
    return np.abs(np.array(stream.logprobs) - chosen).tolist()


@pytest.mark.parametrize("case", ["qwen3-blocks", "qwen2-channels"])
def test_the_oracle_would_miss_activations_that_are_not_quantised(
    make: Any, load_model: Any, make_bench: Any, hand_over: Any, prompts: Any, case: str
) -> None:
    """The comparison can fail: weights alone in FP8 are another model by a thousand times."""
    model = load_model(make(case))
    bench = make_bench(model, **drafting(case, 0))
    said, _ = served(bench, hand_over, bench, prompts)
    layers = tuple(plain(layer) for layer in model.weights.layers)
    other = LoadedModel(model.shape, dataclasses.replace(model.weights, layers=layers))
    misses = [m for s, prompt in zip(said, prompts, strict=True) for m in off(other, prompt, s)]
    print(f"{case}: median {np.median(misses):.2g}")
    assert np.median(misses) > 100 * TOLERANCE


def plain(layer: LayerWeights) -> LayerWeights:
    """Return a dense layer whose weights are what the quantised ones stand for."""

    def value(weight: Matrix) -> Array:
        assert isinstance(weight, ScaledMatrix)
        return weight.values * np.repeat(weight.scales, weight.group, axis=0)[: weight.shape[0]]

    assert layer.mlp is not None
    mlp = MlpWeights(value(layer.mlp.gate_up), value(layer.mlp.down))
    return dataclasses.replace(layer, qkv=value(layer.qkv), o=value(layer.o), mlp=mlp)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mimo-drafts", "glm-experts"])
def test_drafts_are_the_oracles(
    make: Any, load_model: Any, make_bench: Any, make_prompts: Any, case: str
) -> None:
    """Drafts are greedy: one of an activation beyond a step may be another, most may not."""
    model = load_model(make(case))
    bench = make_bench(model, n_draft=1, block_size=8)
    hits = 0
    prompts = make_prompts(12, vocab_size=96)
    for number, prompt in enumerate(prompts):
        key = bench.submit(number + 1, prompt, temperature=0.0, max_tokens=4, hand_over=True)
        bench.drain()
        stream = bench.reader[key]
        tokens = [*prompt, *stream.tokens]
        hidden = reference.forward(model.weights, model.shape, tokens[:-1]).hidden
        out = reference.mtp_forward(model.weights, model.shape, hidden, tokens[1:])
        hits += stream.drafts == (int(out.logits[-1].argmax()),)
    assert hits >= len(prompts) - 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ernie-interleaved", "qwen3-experts"])
def test_nothing_around_a_request_changes_a_bit(
    make: Any, load_model: Any, make_bench: Any, hand_over: Any, make_prompts: Any, case: str
) -> None:
    """Preempted, cached, chunked, in batches of other sizes."""
    model = load_model(make(case))
    prompts = make_prompts(20, seed=3, longest=90, vocab_size=96)

    def said(**options: Any) -> tuple[list[Any], Any]:
        bench = make_bench(model, **options)
        return bits(served(bench, hand_over, bench, prompts)[0]), bench

    alone, _ = said(max_running=1)
    for options in (
        {"max_running": 20},
        {"max_running": 7, "prefill_tokens": 33} | drafting(case, 3),
        {"n_blocks": 18},
    ):
        found, bench = said(**options)
        assert found == alone, options
        bench.reader.streams.clear()
        bench.reader.ended.clear()
        assert bits(served(bench, hand_over, bench, prompts)[0]) == alone, "its prefixes are known"


def config(folder: Path, **engine: Any) -> ProcessConfig:
    sizes: dict[str, Any] = {"max_running": 8, "max_model_len": 128}
    return ProcessConfig(
        model=ModelConfig(str(folder)),
        speculative=SpeculativeConfig("none", 0),
        engine=EngineConfig(**(sizes | engine)),
    )


@pytest.mark.e2e
@pytest.mark.parametrize("case", ["qwen3-blocks", "qwen3-experts"])
def test_two_ranks_say_what_one_says(
    make: Any, bench_of: Any, hand_over: Any, prompts: Any, case: str
) -> None:
    """Ranks have whole groups, so they quantise what one rank does; only sums are rounded apart."""
    sizes = {"head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 256}
    sizes |= {"num_key_value_heads": 4}
    folder = make(case, **sizes)
    said = []
    for ranks in (1, 2):
        with closing(build_engine(config(folder, tensor_parallel_size=ranks))) as engine:
            bench = bench_of(engine)
            said.append(served(bench, hand_over, bench, prompts)[0])
    first = [
        np.abs(np.subtract(one.logprobs, two.logprobs)).tolist()
        for one, two in zip(*said, strict=True)
        if one.tokens == two.tokens
    ]
    assert len(first) >= len(prompts) - 2, "near-ties alone are decided otherwise"
    misses = [miss for stream in first for miss in stream]
    assert np.median(misses) < TOLERANCE
    assert max(misses) < STEP


def test_ranks_that_would_cut_groups_are_refused_at_start_by_field(make: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"engine.tensor_parallel_size is 2, which cuts .*head_dim 160 over 2"
    ):
        build_engine(config(make("qwen3-blocks"), tensor_parallel_size=2))


def test_an_expert_is_a_quantised_mlp(make: Any, load_model: Any) -> None:
    """What the cases above serve is FP8 throughout."""
    mixture = load_model(make("qwen3-experts")).weights.layers[1].mixture
    assert isinstance(mixture, ExpertWeights)
    assert all(isinstance(expert.down, ScaledMatrix) for expert in mixture.experts)
