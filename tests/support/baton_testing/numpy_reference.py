"""The oracle: a full-sequence forward in NumPy float64, without cache, batch or framework.

Owns nothing that runs in production. Tests hold the engine's logits, logprobs and drafts against
it, so it shares no code with the engine beyond `Weights`, and prefers plain formulas to speed:
O(T^2) attention over the whole sequence on every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_testing.e4m3_numbers import nearest
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.matrices import Matrix, ScaledMatrix
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.rope import Llama3Scaling, RopeScaling, YarnScaling
from baton_worker.engine.model.shape import ModelShape, RopeStyle
from baton_worker.engine.model.weights import ExpertWeights, LayerWeights, MlpWeights, Weights

Float64Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]


class Forward(NamedTuple):
    """What a pass yields for each of T positions.

    Attributes:
        logits: float64 `[T, V]`; row i scores the token after the one that row i was given.
        hidden: float64 `[T, H]`, as the next MTP pass takes it (`ModelShape.mtp_hidden`).
    """

    logits: Float64Array
    hidden: Float64Array


class Draft(NamedTuple):
    """A greedy draft, and float64 `[V]` logprobs by the layer that made it."""

    token: int
    logprobs: Float64Array


class GreedyRun(NamedTuple):
    """A greedy continuation and how its first drafts fared under K=1 speculation."""

    token_ids: tuple[int, ...]
    proposed: int
    accepted: int


def forward(weights: Weights, shape: ModelShape, token_ids: Sequence[int]) -> Forward:
    """Run the main model over a whole sequence starting at position 0."""
    x = weights.embed[np.asarray(token_ids)].astype(np.float64)
    for layer in weights.layers:
        x = decoder_layer(x, layer, shape)
    return _head(x, weights.final_norm, weights, shape)


def mtp_forward(
    weights: Weights,
    shape: ModelShape,
    hidden: Float64Array,
    next_token_ids: Sequence[int],
    index: int = 0,
) -> Forward:
    """Run MTP layer k (`index`, from 0) over rows (h_i, t_{i+1+k}), i = 0..T-1: row i scores
    t_{i+2+k}.

    `x_i = concat[rms(emb(t_{i+1+k})), rms(h_i)] @ proj`, then one decoder layer, a norm and the
    main head (ERNIE-4.5; DeepSeek-V3's report, arXiv 2412.19437, equations 21-23, writes h first,
    which its code does not). MiMo's is `concat[rms(h_i), rms(emb(t_{i+1}))] @ proj`, as published.

    Args:
        weights: the model.
        shape: its shape.
        hidden: `[T, H]`, from `forward` for layer 0, else from this function: what the layer before
            made of the same rows, and behind them, for drafts beyond the layers, this one's own.
        next_token_ids: T tokens.
        index: which MTP layer.
    """
    mtp = weights.mtp[index]
    embedded = weights.embed[np.asarray(next_token_ids)].astype(np.float64)
    parts = {
        "embedding": rms_norm(embedded, mtp.emb_norm, shape),
        "hidden": rms_norm(hidden, mtp.hidden_norm, shape),
    }
    both = np.concatenate([parts[name] for name in shape.mtp_order.split("_")], axis=-1)
    x = decoder_layer(product(both, mtp.proj), mtp.layer, shape)
    return _head(x, mtp.final_norm, weights, shape)


def drafts(
    weights: Weights, shape: ModelShape, token_ids: Sequence[int], count: int
) -> list[Draft]:
    """Draft greedily behind `token_ids`.

    Layer k makes draft k + 1 over all positions of the sequence but the last, of what layer k - 1
    made of each and the token k + 1 further on (DeepSeek-V3, equations 21-24); where that is not
    known yet it is a draft. Beyond its layers' number a checkpoint says nothing: the last one goes
    on, a position further each time, its own output in place of the state that it cannot have, as
    published code runs a single layer for several drafts.
    """
    known, made = list(token_ids), []
    hidden = forward(weights, shape, known[:-1]).hidden
    last = len(weights.mtp) - 1
    for number in range(count):
        layer = min(number, last)
        out = mtp_forward(weights, shape, hidden, known[layer + 1 :], layer)
        made.append(Draft(int(out.logits[-1].argmax()), log_softmax(out.logits[-1:])[0]))
        known.append(made[-1].token)
        hidden = out.hidden if number < last else np.concatenate([hidden, out.hidden[-1:]])
    return made


def log_softmax(logits: Float64Array) -> Float64Array:
    """`x - max - log(sum(exp(x - max)))` along the last axis, unclipped."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def greedy(
    weights: Weights, shape: ModelShape, prompt: Sequence[int], max_tokens: int
) -> GreedyRun:
    """Continue `prompt` with the highest logits (lowest id on ties), ignoring end of sequence.

    Acceptance counts verification steps as K=1 speculation takes them: after an accepted draft,
    the next step starts two tokens further.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(int(forward(weights, shape, tokens).logits[-1].argmax()))
    if not weights.mtp:
        return GreedyRun(tuple(tokens[len(prompt) :]), 0, 0)
    hidden = forward(weights, shape, tokens[:-1]).hidden
    drafts = mtp_forward(weights, shape, hidden, tokens[1:]).logits.argmax(axis=-1)
    proposed = accepted = 0
    position = len(prompt) + 1
    while position < len(tokens):
        hit = drafts[position - 2] == tokens[position]
        proposed += 1
        accepted += int(hit)
        position += 1 + int(hit)
    return GreedyRun(tuple(tokens[len(prompt) :]), proposed, accepted)


def rms_norm(x: Float64Array, weight: FloatArray, shape: ModelShape) -> Float64Array:
    """`x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, arXiv 1910.07467)."""
    return _rms_norm(x, weight, shape.rms_norm_eps)


def _rms_norm(x: Float64Array, weight: FloatArray, eps: float) -> Float64Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + eps) * weight)


def _rotated(x: Float64Array, positions: npt.NDArray[np.int64], shape: ModelShape) -> Float64Array:
    """Rotate the first elements of each head, GLM-4.5's half of them; the others stay."""
    size = shape.rotated_size or shape.head_dim
    turned = rope(x[..., :size], positions, shape.rope_theta, shape.rope_style, shape.rope_scaling)
    return np.concatenate([turned, x[..., size:]], axis=-1)


def rope(
    x: Float64Array,
    positions: npt.NDArray[np.int64],
    theta: float,
    style: RopeStyle,
    scaling: RopeScaling | None = None,
) -> Float64Array:
    """Rotate pair j of `[T, heads, D]` at position m by `m * theta^(-2j/D)` (arXiv 2104.09864).

    Pair j is (j, j + D/2) in style `half` and (2j, 2j + 1) in style `interleaved`; a pair is one
    complex number here, its rotation one complex product. `scaling` may change frequencies, and
    lengthen what was rotated.
    """
    size = x.shape[-1]
    first, second = (
        (slice(None, size // 2), slice(size // 2, None))
        if style == "half"
        else (slice(0, None, 2), slice(1, None, 2))
    )
    frequencies = np.array([frequency(j, size, theta, scaling) for j in range(size // 2)])
    angles = positions[:, None, None] * frequencies
    length = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    rotated = length * (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    out = np.empty_like(x)
    out[..., first] = rotated.real
    out[..., second] = rotated.imag
    return out


def frequency(pair: int, size: int, theta: float, scaling: RopeScaling | None) -> float:
    """Return the radians a position of one pair of a head of `size`.

    Llama 3.1 in terms of wavelengths, as Meta published it; YaRN in terms of the number of turns
    within the original context (arXiv 2309.00071, equations 17 to 23), its bounds found pair by
    pair and not solved for.
    """
    plain = theta ** (-2.0 * pair / size)
    if isinstance(scaling, Llama3Scaling):
        return _llama3_frequency(plain, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn_frequency(pair, size, theta, scaling)
    return plain


def _llama3_frequency(plain: float, scaling: Llama3Scaling) -> float:
    wavelength = 2 * math.pi / plain
    if wavelength < scaling.original_positions / scaling.high_freq_factor:
        return plain
    if wavelength > scaling.original_positions / scaling.low_freq_factor:
        return plain / scaling.factor
    smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn_frequency(pair: int, size: int, theta: float, scaling: YarnScaling) -> float:
    def turns(of: float) -> float:
        return scaling.original_positions * theta ** (-2.0 * of / size) / (2 * math.pi)

    # The last whole pair that turns at least beta_fast times, the first that turns at most
    # beta_slow times; a pair may be one that the head has not.
    pairs = range(-size, 4 * size)
    low = max((p for p in pairs if turns(p) >= scaling.beta_fast), default=0)
    high = min((p for p in pairs if turns(p) <= scaling.beta_slow), default=size - 1)
    low, high = max(low, 0), min(high, size - 1)
    ramp = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
    plain = theta ** (-2.0 * pair / size)
    return ramp * plain / scaling.factor + (1 - ramp) * plain


def _head(x: Float64Array, norm: FloatArray, weights: Weights, shape: ModelShape) -> Forward:
    normed = rms_norm(x, norm, shape)
    return Forward(normed @ weights.lm_head, x if shape.mtp_hidden == "pre_norm" else normed)


def decoder_layer(x: Float64Array, layer: LayerWeights, shape: ModelShape) -> Float64Array:
    """Return f64[T, H]: attention, then the gated MLP, each added to what it was given."""
    normed = rms_norm(x, layer.input_norm, shape)
    if shape.mla is None:
        x = x + _attention(normed, layer, shape)
    else:
        x = x + _latent_attention(normed, layer, shape, shape.mla)
    normed = rms_norm(x, layer.post_norm, shape)
    if layer.mlp is not None:
        x = x + mlp(normed, layer.mlp)
    if layer.mixture is not None:
        assert shape.experts is not None
        x = x + np.array([mixture(row, layer.mixture, shape.experts) for row in normed])
    return x


def product(x: Float64Array, weight: Matrix) -> Float64Array:
    """`x @ weight`; of a quantised weight, both in e4m3 with scales for each group of elements.

    A group's activations are divided by their largest / 448 and rounded (DeepSeek-V3, arXiv
    2412.19437, section 3.3.2); the groups' products, times both scales, are added.
    """
    if not isinstance(weight, ScaledMatrix):
        return np.asarray(x @ weight)
    out = np.zeros((*x.shape[:-1], weight.shape[1]))
    for n, start in enumerate(range(0, x.shape[-1], weight.group)):
        part = x[..., start : start + weight.group]
        scale = np.abs(part).max(axis=-1, keepdims=True) / 448.0
        rounded = nearest(part / np.where(scale == 0.0, 1.0, scale))
        out += rounded @ weight.values[start : start + weight.group] * scale * weight.scales[n]
    return out


def mlp(x: Float64Array, weights: MlpWeights) -> Float64Array:
    """`(silu(x gate) * (x up)) down` (Shazeer, arXiv 2002.05202)."""
    gate, up = np.split(product(x, weights.gate_up), 2, axis=-1)
    return product(gate / (1.0 + np.exp(-gate)) * up, weights.down)


def mixture(x: Float64Array, weights: ExpertWeights, experts: Experts) -> Float64Array:
    """One token f64[H]: the sum of what its experts make of it, each times its weight.

    The experts are those with the highest scores, the learned bias added: Qwen3's without one
    (arXiv 2505.09388), DeepSeek-V3's among the groups whose two best add up to most (arXiv
    2412.19437, equations 12 to 16). The weights are the scores without the bias, over their sum.
    """
    products = x @ weights.router
    scores = 1.0 / (1.0 + np.exp(-products))
    if experts.scores == "softmax":
        scores = np.exp(log_softmax(products))
    wanted = scores if weights.choice_bias is None else scores + weights.choice_bias
    size = experts.count // experts.n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(experts.n_groups)]
    if experts.n_chosen_groups < experts.n_groups:
        groups.sort(key=lambda group: -sum(sorted(wanted[i] for i in group)[-2:]))
    candidates = sorted(i for group in groups[: experts.n_chosen_groups] for i in group)
    if np.isnan(wanted).any():
        return np.full_like(x, np.nan)
    own = sorted(candidates, key=lambda i: -wanted[i])[: experts.chosen]
    total = sum(scores[i] for i in own) if experts.normalises else 1.0
    out = np.zeros_like(x)
    for i in own:
        weight = experts.scaling * scores[i] / max(total, experts.least_sum)
        out += weight * mlp(x, weights.experts[i])
    return out


def _attention(x: Float64Array, layer: LayerWeights, shape: ModelShape) -> Float64Array:
    """Causal grouped-query attention: `softmax(q k^T / sqrt(D) + mask) v`, one head at a time.

    Qwen2 adds biases to queries, keys and values (arXiv 2407.10671, section 2.2.1); Qwen3 norms
    each query and key head before it is rotated (arXiv 2505.09388, section 2).
    """
    length = x.shape[0]
    positions = np.arange(length)
    projected = product(x, layer.qkv)
    if layer.qkv_bias is not None:
        projected = projected + layer.qkv_bias
    flat = np.split(projected, [shape.q_size, shape.q_size + shape.kv_size], axis=-1)
    q, k, v = (part.reshape(length, -1, shape.head_dim) for part in flat)
    if layer.qk_norm is not None:
        q, k = (rms_norm(x, w, shape) for x, w in zip((q, k), layer.qk_norm, strict=True))
    q, k = (_rotated(part, positions, shape) for part in (q, k))
    future = np.triu(np.full((length, length), -np.inf), k=1)
    heads = []
    for head in range(shape.n_heads):
        group = head * shape.n_kv_heads // shape.n_heads
        scores = q[:, head] @ k[:, group].T / np.sqrt(shape.head_dim) + future
        heads.append(np.exp(log_softmax(scores)) @ v[:, group])
    return product(np.concatenate(heads, axis=-1), layer.o)


def _latent_attention(
    x: Float64Array, layer: LayerWeights, shape: ModelShape, mla: Mla
) -> Float64Array:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 37 to 47), not folded:
    keys and values of every head are made of the compressed rows, and attended to one by one.
    """
    length, latent = x.shape[0], layer.latent
    assert latent is not None
    positions = np.arange(length)
    query, row, key = np.split(
        product(x, layer.qkv),
        np.cumsum([mla.q_rank or shape.n_heads * mla.query_size, mla.kv_rank]),
        axis=-1,
    )
    if latent.q_up is not None and latent.q_norm is not None:
        query = product(_rms_norm(query, latent.q_norm, mla.norm_eps), latent.q_up)
    query = query.reshape(length, shape.n_heads, mla.query_size)
    row = _rms_norm(row, latent.kv_norm, mla.norm_eps)

    def turned(part: Float64Array) -> Float64Array:
        return rope(part, positions, shape.rope_theta, shape.rope_style, shape.rope_scaling)

    shared = turned(key[:, None])[:, 0]
    rotated = turned(query[..., mla.nope_size :])
    future = np.triu(np.full((length, length), -np.inf), k=1)
    heads = []
    for head in range(shape.n_heads):
        unfolded = row @ latent.kv_up[head].T.astype(np.float64)
        keys = np.concatenate([unfolded[:, : mla.nope_size], shared], axis=-1)
        queries = np.concatenate([query[:, head, : mla.nope_size], rotated[:, head]], axis=-1)
        scores = mla.score_scale * (queries @ keys.T) + future
        heads.append(np.exp(log_softmax(scores)) @ unfolded[:, mla.nope_size :])
    return product(np.concatenate(heads, axis=-1), layer.o)
