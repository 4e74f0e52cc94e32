"""The decoder and its MTP layer in Paddle, for training only.

Owns the forward pass with gradients and the loss. The engine has its own forward; the two meet only
in the checkpoint, whose names and layout (`[out, in]`) are Hugging Face's for ERNIE-4.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F

Parameters = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the tiny model."""

    vocab: int = 512
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 192
    rope_theta: float = 10000.0
    eps: float = 1e-5
    max_positions: int = 1024


class Rotation(NamedTuple):
    """RoPE tables `[1, T, 1, D]`, and the matrix `[D, D]` that turns every pair by 90 degrees."""

    cos: Any
    sin: Any
    quarter_turns: Any


def init_parameters(shape: Shape, seed: int) -> Parameters:
    """Return parameters by checkpoint key, matrices `[in, out]`, drawn from `seed` alone."""
    rng = np.random.default_rng(seed)
    hidden = shape.hidden
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for prefix in [f"model.layers.{i}" for i in range(shape.layers)] + ["model.mtp_block.0"]:
        sizes |= _layer_sizes(prefix, shape)
    sizes |= {
        "model.mtp_emb_norm.0.weight": (hidden,),
        "model.mtp_hidden_norm.0.weight": (hidden,),
        "model.mtp_linear_proj.0.weight": (2 * hidden, hidden),
        "model.norm.weight": (hidden,),
    }
    return {key: _parameter(size, key, rng) for key, size in sizes.items()}


def loss(p: Parameters, shape: Shape, windows: Any) -> tuple[Any, Any]:
    """Return mean negative log-likelihoods (main, MTP) of int64 windows `[B, T + 2]`.

    Main row i sees t_i and predicts t_{i+1}; MTP row i sees h_i and t_{i+1} and predicts t_{i+2}.
    """
    length = windows.shape[1] - 2
    rotation = _rotation(shape, length)
    mask = paddle.to_tensor(np.triu(np.full((length, length), -1e9, np.float32), 1))
    embedded = F.embedding(windows[:, :-1], p["model.embed_tokens.weight"])
    x = embedded[:, :-1]
    for i in range(shape.layers):
        x = _layer(p, f"model.layers.{i}", x, shape, rotation, mask)
    mtp_in = paddle.concat(
        [
            _rms(embedded[:, 1:], p["model.mtp_emb_norm.0.weight"], shape),
            _rms(x, p["model.mtp_hidden_norm.0.weight"], shape),
        ],
        axis=-1,
    )
    y = _layer(
        p,
        "model.mtp_block.0",
        mtp_in @ p["model.mtp_linear_proj.0.weight"],
        shape,
        rotation,
        mask,
    )
    return _nll(p, x, windows[:, 1:-1], shape), _nll(p, y, windows[:, 2:], shape)


def to_checkpoint(p: Parameters) -> dict[str, np.ndarray]:
    """Return float16 arrays in checkpoint layout: projections turned to `[out, in]`."""
    return {key: _stored(key, value.numpy()).astype(np.float16) for key, value in p.items()}


def _stored(key: str, value: np.ndarray) -> np.ndarray:
    is_projection = value.ndim == 2 and "embed" not in key
    return np.ascontiguousarray(value.T) if is_projection else value


def _layer_sizes(prefix: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
    q = shape.heads * shape.head_dim
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (hidden, q),
        f"{prefix}.self_attn.k_proj.weight": (hidden, kv),
        f"{prefix}.self_attn.v_proj.weight": (hidden, kv),
        f"{prefix}.self_attn.o_proj.weight": (q, hidden),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (hidden, shape.intermediate),
        f"{prefix}.mlp.up_proj.weight": (hidden, shape.intermediate),
        f"{prefix}.mlp.down_proj.weight": (shape.intermediate, hidden),
    }


def _parameter(size: tuple[int, ...], key: str, rng: np.random.Generator) -> Any:
    if len(size) == 1:
        value = np.ones(size)
    elif "embed" in key:
        value = rng.normal(0.0, 0.05, size)
    else:
        value = rng.normal(0.0, size[0] ** -0.5, size)
    return paddle.to_tensor(value.astype(np.float32), stop_gradient=False)


def _rotation(shape: Shape, length: int) -> Rotation:
    frequencies = shape.rope_theta ** (-2.0 * np.arange(shape.head_dim // 2) / shape.head_dim)
    angles = np.repeat(np.arange(length)[:, None] * frequencies, 2, axis=1).astype(np.float32)
    quarter_turn = np.array([[0.0, 1.0], [-1.0, 0.0]], np.float32)
    return Rotation(
        cos=paddle.to_tensor(np.cos(angles)[None, :, None]),
        sin=paddle.to_tensor(np.sin(angles)[None, :, None]),
        quarter_turns=paddle.to_tensor(
            np.kron(np.eye(shape.head_dim // 2, dtype=np.float32), quarter_turn)
        ),
    )


def _rotate(x: Any, rotation: Rotation) -> Any:
    """Rotate neighbouring pairs (2j, 2j + 1) of `[B, T, heads, D]`, as ERNIE.

    The pairs' quarter turn is a matrix product, because strided slices are slow on the CPU.
    """
    return x * rotation.cos + (x @ rotation.quarter_turns) * rotation.sin


def _rms(x: Any, weight: Any, shape: Shape) -> Any:
    return x * paddle.rsqrt((x * x).mean(axis=-1, keepdim=True) + shape.eps) * weight


def _layer(p: Parameters, prefix: str, x: Any, shape: Shape, rotation: Rotation, mask: Any) -> Any:
    normed = _rms(x, p[f"{prefix}.input_layernorm.weight"], shape)
    x = x + _attention(p, f"{prefix}.self_attn", normed, shape, rotation, mask)
    normed = _rms(x, p[f"{prefix}.post_attention_layernorm.weight"], shape)
    gate = F.silu(normed @ p[f"{prefix}.mlp.gate_proj.weight"])
    return (
        x
        + (gate * (normed @ p[f"{prefix}.mlp.up_proj.weight"]))
        @ p[f"{prefix}.mlp.down_proj.weight"]
    )


def _attention(
    p: Parameters, prefix: str, x: Any, shape: Shape, rotation: Rotation, mask: Any
) -> Any:
    batch, length, _ = x.shape

    def heads(name: str, count: int) -> Any:
        return (x @ p[f"{prefix}.{name}.weight"]).reshape([batch, length, count, shape.head_dim])

    q = _rotate(heads("q_proj", shape.heads), rotation).transpose([0, 2, 1, 3])
    k = _rotate(heads("k_proj", shape.kv_heads), rotation).transpose([0, 2, 1, 3])
    v = heads("v_proj", shape.kv_heads).transpose([0, 2, 1, 3])
    # Query heads of one group share a key head, so they fold into its row dimension.
    group = shape.heads // shape.kv_heads
    q = q.reshape([batch, shape.kv_heads, group * length, shape.head_dim])
    scores = q.matmul(k, transpose_y=True) * shape.head_dim**-0.5
    scores = scores.reshape([batch, shape.kv_heads, group, length, length]) + mask
    weights = F.softmax(scores).reshape([batch, shape.kv_heads, group * length, length])
    out = weights.matmul(v).reshape([batch, shape.heads, length, shape.head_dim])
    return out.transpose([0, 2, 1, 3]).reshape([batch, length, -1]) @ p[f"{prefix}.o_proj.weight"]


def _nll(p: Parameters, x: Any, labels: Any, shape: Shape) -> Any:
    """`logsumexp(logits) - logits[label]`.

    Written out, because Paddle's cross entropy is quadratic in the vocabulary on the CPU.
    """
    normed = _rms(x, p["model.norm.weight"], shape).reshape([-1, shape.hidden])
    logits = normed.matmul(p["model.embed_tokens.weight"], transpose_y=True)
    shifted = logits - logits.max(axis=-1, keepdim=True).detach()
    gold = paddle.index_sample(shifted, labels.reshape([-1, 1]))[:, 0]
    return (paddle.log(paddle.exp(shifted).sum(axis=-1)) - gold).mean()
