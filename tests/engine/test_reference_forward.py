"""The oracle obeys the properties that define a causal decoder with rotary positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_testing.numpy_reference import forward, greedy, log_softmax, mtp_forward, rope
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.weights import LayerWeights, Weights, load_weights


@dataclasses.dataclass(frozen=True)
class Loaded:
    shape: ModelShape
    weights: Weights


@pytest.fixture
def load(make_checkpoint: Callable[..., Any]) -> Callable[..., Loaded]:
    def make(**arguments: Any) -> Loaded:
        path = make_checkpoint(**arguments).path
        shape = load_shape(path)
        return Loaded(shape, load_weights(path, shape))

    return make


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, count).tolist()


@pytest.mark.parametrize("family", ["llama", "ernie4_5", "qwen2", "mimo"])
def test_later_tokens_change_no_earlier_logits(load: Callable[..., Loaded], family: str) -> None:
    model = load(family=family)
    ids = tokens(20)
    whole = forward(model.weights, model.shape, ids)
    prefix = forward(model.weights, model.shape, ids[:12])
    np.testing.assert_allclose(whole.logits[:12], prefix.logits, rtol=0, atol=1e-12)
    changed = forward(model.weights, model.shape, [*ids[:12], *tokens(8, seed=1)])
    np.testing.assert_allclose(changed.logits[:12], prefix.logits, rtol=0, atol=1e-12)
    assert np.abs(changed.logits[12:] - whole.logits[12:]).max() > 1e-3


def test_earlier_tokens_change_later_logits(load: Callable[..., Loaded]) -> None:
    model = load()
    ids = tokens(20)
    whole = forward(model.weights, model.shape, ids)
    other = forward(model.weights, model.shape, [(ids[0] + 1) % 96, *ids[1:]])
    assert np.abs(other.logits[19] - whole.logits[19]).max() > 1e-4


def test_mtp_is_causal_and_sees_both_hidden_state_and_next_token(
    load: Callable[..., Loaded],
) -> None:
    model = load()
    ids = tokens(20)
    hidden = forward(model.weights, model.shape, ids).hidden[:-1]
    whole = mtp_forward(model.weights, model.shape, hidden, ids[1:])
    part = mtp_forward(model.weights, model.shape, hidden[:8], ids[1:9])
    np.testing.assert_allclose(whole.logits[:8], part.logits, rtol=0, atol=1e-12)
    other_token = mtp_forward(
        model.weights, model.shape, hidden[:8], [*ids[1:8], (ids[8] + 1) % 96]
    )
    assert np.abs(other_token.logits[7] - part.logits[7]).max() > 1e-3
    other_hidden = hidden[:8].copy()
    other_hidden[7] = hidden[0]
    other = mtp_forward(model.weights, model.shape, other_hidden, ids[1:9])
    assert np.abs(other.logits[7] - part.logits[7]).max() > 1e-3


def test_the_hidden_state_handed_to_mtp_follows_the_switch(load: Callable[..., Loaded]) -> None:
    before = load(baton_mtp_hidden="pre_norm")
    after = load(baton_mtp_hidden="post_norm")
    ids = tokens(6)
    raw = forward(before.weights, before.shape, ids)
    normed = forward(after.weights, after.shape, ids)
    np.testing.assert_array_equal(raw.logits, normed.logits)
    rms = np.sqrt(np.mean(raw.hidden**2, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        raw.hidden / rms * before.weights.final_norm, normed.hidden, rtol=1e-12
    )


def permute_heads(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Move column pair (2j, 2j + 1) of each head to (j, j + head_dim / 2)."""
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return matrix.reshape(matrix.shape[0], -1, head_dim)[..., order].reshape(matrix.shape)


def to_half(layer: LayerWeights, shape: ModelShape) -> LayerWeights:
    rotated = shape.q_size + shape.kv_size
    qkv = [permute_heads(layer.qkv[:, :rotated], shape.head_dim), layer.qkv[:, rotated:]]
    return dataclasses.replace(layer, qkv=np.concatenate(qkv, axis=1))


def test_both_rope_styles_are_one_model_with_permuted_heads(load: Callable[..., Loaded]) -> None:
    model = load(family="ernie4_5")
    assert model.shape.rope_style == "interleaved"
    half_shape = dataclasses.replace(model.shape, rope_style="half")
    half = dataclasses.replace(
        model.weights,
        layers=tuple(to_half(layer, half_shape) for layer in model.weights.layers),
    )
    ids = tokens(16)
    expected = forward(model.weights, model.shape, ids).logits
    found = forward(half, half_shape, ids).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    unpermuted = forward(model.weights, half_shape, ids).logits
    assert np.abs(unpermuted - expected).max() > 1e-3


@pytest.mark.parametrize("style", ["half", "interleaved"])
@settings(deadline=None)
@given(
    first=st.integers(0, 500),
    second=st.integers(0, 500),
    shift=st.integers(0, 500),
    seed=st.integers(0, 2**32 - 1),
)
def test_rotated_products_depend_on_the_distance_alone(
    style: Any, first: int, second: int, shift: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, 1, 1, 16))

    def product(at_q: int, at_k: int) -> float:
        turned_q = rope(q, np.array([at_q]), 10000.0, style)
        turned_k = rope(k, np.array([at_k]), 10000.0, style)
        return float((turned_q * turned_k).sum())

    assert product(first, second) == pytest.approx(
        product(first + shift, second + shift), rel=0, abs=1e-9
    )


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        # Pair 0 turns by 1 rad, pair 1 by theta^(-2/4) = 0.01 rad, both from (1, 0).
        ("half", [np.cos(1), np.cos(0.01), np.sin(1), np.sin(0.01)]),
        ("interleaved", [np.cos(1), np.sin(1), np.cos(0.01), np.sin(0.01)]),
    ],
)
def test_rope_turns_the_pairs_of_its_style(style: Any, expected: list[float]) -> None:
    x = np.array([1.0, 1.0, 0.0, 0.0] if style == "half" else [1.0, 0.0, 1.0, 0.0])
    turned = rope(x.reshape(1, 1, 4), np.array([1]), 10000.0, style)
    np.testing.assert_allclose(turned.reshape(4), expected, rtol=0, atol=1e-15)


def test_log_softmax_is_normalised_and_unclipped() -> None:
    logits = np.array([[0.0, -1000.0, 3.0], [1e4, 1e4, -np.inf]])
    found = log_softmax(logits)
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1.0, rtol=1e-15)
    assert found[0, 1] == pytest.approx(-1000.0 - np.log(1.0 + np.exp(3.0)), rel=1e-15)
    assert found[1].tolist() == [pytest.approx(-np.log(2.0)), pytest.approx(-np.log(2.0)), -np.inf]


def test_greedy_counts_drafts_as_speculation_takes_them(load: Callable[..., Loaded]) -> None:
    model = load()
    prompt = tokens(5)
    run = greedy(model.weights, model.shape, prompt, 24)
    ids = [*prompt, *run.token_ids]
    assert len(run.token_ids) == 24
    for i in range(len(prompt), len(ids)):
        assert ids[i] == forward(model.weights, model.shape, ids[:i]).logits[-1].argmax()
    # Step by step: each verification emits one token, and one more when its draft was right.
    emitted, proposed, accepted = 1, 0, 0
    while emitted < 24:
        known = ids[: len(prompt) + emitted]
        hidden = forward(model.weights, model.shape, known[:-1]).hidden
        draft = mtp_forward(model.weights, model.shape, hidden, known[1:]).logits[-1].argmax()
        is_hit = bool(draft == ids[len(known)])
        proposed, accepted = proposed + 1, accepted + is_hit
        emitted += 1 + is_hit
    assert (run.proposed, run.accepted) == (proposed, accepted)


def test_greedy_without_mtp_proposes_nothing(load: Callable[..., Loaded]) -> None:
    model = load(num_nextn_predict_layers=0)
    run = greedy(model.weights, model.shape, tokens(3), 4)
    assert (len(run.token_ids), run.proposed, run.accepted) == (4, 0, 0)
