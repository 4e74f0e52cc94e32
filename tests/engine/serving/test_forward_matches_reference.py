"""The engine's tokens, logprobs and drafts are those of the float64 reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton_testing import numpy_reference as reference
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.rope import Llama3Scaling, YarnScaling

ENGINES = ("paddle", "device")

TOLERANCE = 5e-5

SHAPES = [
    pytest.param({"rope_style": rope, "mtp_hidden": hidden, **heads}, id=f"{rope}-{hidden}-{name}")
    for rope, hidden, (name, heads) in itertools.product(
        ("half", "interleaved"),
        ("pre_norm", "post_norm"),
        (
            ("mha", {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16}),
            ("gqa", {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}),
            ("mqa", {"n_heads": 3, "n_kv_heads": 1, "head_dim": 12}),
        ),
    )
] + [
    pytest.param({"rope_style": "half", "has_qk_norm": True, **heads}, id=f"qk-norm-{name}")
    for name, heads in (
        ("gqa", {"n_heads": 4, "n_kv_heads": 2, "head_dim": 12}),
        ("mqa", {"n_heads": 3, "n_kv_heads": 1, "head_dim": 16}),
    )
]
LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 32)
YARN = YarnScaling(4.0, 16, beta_fast=2.0, beta_slow=0.5, attention_factor=1.2)
SHAPES += [
    pytest.param({"has_qkv_bias": True, **fields}, id=f"qkv-bias-{name}")
    for name, fields in (
        ("half", {"rope_style": "half", "mtp_order": "hidden_embedding"}),
        ("interleaved", {"rope_style": "interleaved", "n_heads": 3, "n_kv_heads": 1}),
        ("post_norm", {"mtp_hidden": "post_norm", "mtp_order": "hidden_embedding"}),
        ("qk-norm", {"rope_style": "half", "has_qk_norm": True}),
    )
] + [
    pytest.param({"rope_style": style, "rope_scaling": scaling}, id=f"{name}-{style}")
    for style in ("half", "interleaved")
    for name, scaling in (("llama3", LLAMA3), ("yarn", YARN))
]


MLA = Mla(q_rank=20, kv_rank=16, nope_size=8, rope_size=6, value_size=10, score_scale=0.3)
SHAPES += [
    pytest.param(
        {
            "n_heads": 3,
            "n_kv_heads": 1,
            "head_dim": mla.row_size,
            "rope_style": style,
            "rope_scaling": YARN,
            "mla": mla,
        },
        id=f"mla-{style}-{name}",
    )
    for style in ("half", "interleaved")
    for name, mla in (
        ("compressed", MLA),
        ("whole-queries", replace(MLA, q_rank=0)),
        ("published-heads", Mla(48, 512, 128, 64, 128, score_scale=192**-0.5)),
        ("narrow", replace(MLA, kv_rank=6, rope_size=2, norm_eps=1e-2)),
    )
]


@pytest.mark.parametrize("shape", SHAPES)
def test_emitted_tokens_and_logprobs_are_the_references(
    make_model: Any, make_bench: Any, make_prompts: Any, shape: dict[str, Any]
) -> None:
    model = make_model(**shape)
    bench = make_bench(model, n_draft=2, block_size=8)
    prompts = make_prompts(5, vocab_size=model.shape.vocab_size)
    keys = [
        bench.submit(i + 1, p, temperature=0.0, max_tokens=12, logprobs_k=5)
        for i, p in enumerate(prompts)
    ]
    bench.drain()
    for key, prompt in zip(keys, prompts, strict=True):
        stream = bench.reader[key]
        expected = model.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        assert stream.tokens == expected.argmax(axis=1).tolist()
        chosen = expected[np.arange(len(expected)), stream.tokens]
        np.testing.assert_allclose(stream.logprobs, chosen, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_the_references(
    make_model: Any, make_bench: Any, make_prompts: Any, shape: dict[str, Any]
) -> None:
    model = make_model(**shape)
    bench = make_bench(model, n_draft=4, block_size=8)
    for number, prompt in enumerate(make_prompts(4, vocab_size=model.shape.vocab_size)):
        key = bench.submit(number + 1, prompt, temperature=0.0, max_tokens=9, hand_over=True)
        bench.drain()
        stream = bench.reader[key]
        assert stream.drafts == _reference_drafts(model, [*prompt, *stream.tokens], 4)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "ernie4_5",
        "qwen2",
        "qwen3",
        "mimo",
        "qwen3_moe",
        "ernie4_5_moe",
        "glm4_moe",
        "deepseek_v3",
    ],
)
def test_a_checkpoint_is_served_by_its_hugging_face_names(
    load_model: Any, make_checkpoint: Any, make_bench: Any, make_prompts: Any, family: str
) -> None:
    sizes = {"qk_rope_head_dim": 4} if family == "deepseek_v3" else {"head_dim": 12}
    model = load_model(make_checkpoint(family, **sizes).path)
    bench = make_bench(model, n_draft=2 * model.shape.n_mtp_layers)
    for number, prompt in enumerate(make_prompts(4, vocab_size=96)):
        key = bench.submit(number, prompt, temperature=0.0, max_tokens=12, logprobs_k=0)
        bench.drain()
        stream = bench.reader[key]
        expected = model.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        assert stream.tokens == expected.argmax(axis=1).tolist()
        np.testing.assert_allclose(stream.logprobs, expected.max(axis=1), rtol=0, atol=TOLERANCE)


def _reference_drafts(model: Any, tokens: list[int], count: int) -> tuple[int, ...]:
    made = reference.drafts(model.weights, model.shape, tokens, count)
    return tuple(draft.token for draft in made)


def test_trained_drafts_stay_the_references_while_decoding(tiny: Any, make_bench: Any) -> None:
    """Acceptance over a long decode is the reference's, so MTP's KV is right behind rejections."""
    prompt = tuple(range(40, 60))
    bench = make_bench(n_draft=1)
    key = bench.submit(1, prompt, temperature=0.0, max_tokens=40)
    results = bench.drain()
    expected = reference.greedy(tiny.weights, tiny.shape, prompt, 40)
    assert tuple(bench.reader[key].tokens) == expected.token_ids
    accepted = sum(int(r.stats.accepted_by_position.sum()) for r in results)
    proposed = sum(int(r.stats.proposed_by_position.sum()) for r in results)
    # The engine does not verify a draft that could not be emitted any more.
    assert expected.accepted - 1 <= accepted <= expected.accepted
    assert expected.proposed - 1 <= proposed <= expected.proposed
    assert accepted > 0
