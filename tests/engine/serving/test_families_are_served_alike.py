"""Each family's own checkpoint: the reference's tokens for any K, in one engine and in a pair.

MiMo, ERNIE, GLM and DeepSeek draft with a layer of their own, Qwen2 and Qwen3 have none and look
drafts up.
The checkpoints are random, in the families' own names, and stored as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing import numpy_reference as reference
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import NO_DRAFTS, DraftSources

ENGINES = ("paddle", "device")

TOLERANCE = 5e-5
TOKENS = 14
LOOKUP = DraftSources(0, NgramSizes(1, 3))

STRETCHED = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CASES = {
    "qwen2": ("qwen2", {"num_nextn_predict_layers": 0, "tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"num_nextn_predict_layers": 0, "tie_word_embeddings": True}),
    "mimo": ("mimo", {"tie_word_embeddings": False}),
    "mimo-two-layers": ("mimo", {"tie_word_embeddings": False, "num_nextn_predict_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": False}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "deepseek_v3": ("deepseek_v3", {"rope_scaling": STRETCHED}),
    "deepseek_v3-whole-queries": ("deepseek_v3", {"q_lora_rank": None}),
}
DRAFTS_ITSELF = ("mimo", "ernie4_5_moe", "glm4_moe", "deepseek_v3")


def drafting(family: str, k: int) -> dict[str, Any]:
    """Return the options of K drafts, from where the family has them."""
    if not k:
        return {"n_draft": 0, "use_mtp": False, "drafts": NO_DRAFTS}
    if family in DRAFTS_ITSELF:
        return {"n_draft": k, "use_mtp": True, "drafts": DraftSources()}
    return {"n_draft": k, "use_mtp": False, "drafts": LOOKUP}


@pytest.fixture(params=CASES)
def family_and_model(
    request: pytest.FixtureRequest, make_checkpoint: Callable[..., Any], load_model: Any
) -> tuple[str, Any]:
    family, config = CASES[request.param]
    return family, load_model(make_checkpoint(family, storage="BF16", **config).path)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("is_pair", [False, True], ids=["mixed", "pair"])
def test_the_output_is_the_references(
    make_bench: Any,
    hand_over: Any,
    make_prompts: Any,
    family_and_model: tuple[str, Any],
    is_pair: bool,
    k: int,
) -> None:
    family, model = family_and_model
    options = drafting(family, k) | {"block_size": 8, "prefill_tokens": 11}
    prefill = decode = make_bench(model, **options)
    prompts = [prompt * 2 for prompt in make_prompts(5, vocab_size=96, longest=12)]
    sampling = [{"temperature": 0.7 * (n % 2), "seed": 5 + n} for n in range(len(prompts))]
    keys = [
        prefill.submit(n, prompt, max_tokens=TOKENS, logprobs_k=3, hand_over=is_pair, **sampling[n])
        for n, prompt in enumerate(prompts)
    ]
    if is_pair:
        decode = make_bench(model, reader=prefill.reader, **options)
        hand_over(prefill, decode, prefill.handoffs())
    results = decode.drain()
    for key, prompt, sampled in zip(keys, prompts, sampling, strict=True):
        stream = decode.reader[key]
        expected = model.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        assert len(stream.tokens) == TOKENS
        if not sampled["temperature"]:
            assert stream.tokens == expected.argmax(axis=1).tolist()
        chosen = expected[np.arange(TOKENS), stream.tokens]
        np.testing.assert_allclose(stream.logprobs, chosen, rtol=0, atol=TOLERANCE)
        best = np.argsort(-expected, axis=1, kind="stable")[:, :3]
        assert [[token for token, _ in row] for row in stream.topk] == best.tolist()
    proposed = sum(int(result.stats.proposed_by_position.sum()) for result in results)
    assert (proposed > 0) == (k > 0), "the cell must do what it is named for"


@pytest.mark.parametrize("k", [1, 3])
def test_any_number_of_drafts_and_either_way_samples_the_same(
    make_bench: Any, make_prompts: Any, family_and_model: tuple[str, Any], k: int
) -> None:
    family, model = family_and_model
    said = []
    for count in (0, k):
        bench = make_bench(model, **drafting(family, count))
        keys = [
            bench.submit(n, prompt * 2, temperature=0.9, seed=n, max_tokens=TOKENS)
            for n, prompt in enumerate(make_prompts(6, vocab_size=96, longest=12))
        ]
        bench.drain()
        said.append([bench.reader[key].tokens for key in keys])
    assert said[0] == said[1]


def test_mimos_drafts_are_the_published_formulas(
    make_bench: Any, make_checkpoint: Callable[..., Any], load_model: Any, make_prompts: Any
) -> None:
    """Draft 1 of the layer over (h, t + 1), those behind of its own output; held to float64."""
    model = load_model(make_checkpoint("mimo", tie_word_embeddings=False).path)
    bench = make_bench(model, n_draft=4, block_size=8)
    for number, prompt in enumerate(make_prompts(4, vocab_size=96)):
        key = bench.submit(number + 1, prompt, temperature=0.0, max_tokens=9, hand_over=True)
        bench.drain()
        stream = bench.reader[key]
        assert stream.drafts == published_drafts(model, [*prompt, *stream.tokens], 4)


def published_drafts(model: Any, tokens: list[int], count: int) -> tuple[int, ...]:
    """Draft as MiMo's own model code computes it, from the checkpoint's arrays alone.

    `h = final_layernorm(layer(input_proj(cat[hidden_layernorm(h), token_layernorm(e)])))`, h being
    the main model's output behind its norm and then the layer's own.
    """
    weights, shape = model.weights, model.shape
    mtp = weights.mtp[0]
    hidden = reference.forward(weights, shape, tokens[:-1]).hidden
    following = tokens[1:]
    drafts: list[int] = []
    for _ in range(count):
        embedded = weights.embed[np.asarray(following)].astype(np.float64)
        states = reference.rms_norm(hidden, mtp.hidden_norm, shape)
        words = reference.rms_norm(embedded, mtp.emb_norm, shape)
        joined = np.concatenate([states, words], axis=-1) @ mtp.proj
        out = reference.decoder_layer(joined, mtp.layer, shape)
        normed = reference.rms_norm(out, mtp.final_norm, shape)
        drafts.append(int((normed[-1] @ weights.lm_head).argmax()))
        hidden = np.concatenate([hidden, normed[-1:]])
        following = [*following, drafts[-1]]
    return tuple(drafts)
