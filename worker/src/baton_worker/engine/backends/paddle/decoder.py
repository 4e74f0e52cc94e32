"""The decoder's arithmetic: flat tokens in, hidden states and logits out.

Owns the forward pass of the main model and of its MTP layers, as functions of weights, tokens and
an attention plan. Knows no requests, no sampling and no block allocation. Two rewrites happen once,
at load: interleaved and partial RoPE become the half style of whole heads by permuting query and
key columns alike (scores do not change), and 1/sqrt(head_dim) moves into the query projection (of a
quantised one into its scales), or into the query heads' norm, which would undo it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.paddle.attention import AttentionBackend
from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.backends.paddle.latent import Latent, rewrite_input, rotate
from baton_worker.engine.backends.paddle.mixture import Mixture
from baton_worker.engine.backends.paddle.norm import rms_norm
from baton_worker.engine.backends.paddle.products import Mlp, Product, product_of
from baton_worker.engine.backends.paddle.scaled_products import ScaledProduct
from baton_worker.engine.kv.layers import marked_layers
from baton_worker.engine.kv.layout import TokenGroup, flat_positions, pad_rows
from baton_worker.engine.model.matrices import Matrix, ScaledMatrix
from baton_worker.engine.model.rope import rope_tables, stretches
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.weights import LayerWeights, MtpWeights, Weights

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks of a worker; the argument may be overwritten."""


class _Layer(NamedTuple):
    """`LayerWeights` as Paddle tensors, in the rewritten form."""

    input_norm: Tensor
    qkv: Product | ScaledProduct
    o: Product | ScaledProduct
    post_norm: Tensor
    mlp: Mlp | None
    qk_norm: tuple[Tensor, Tensor] | None
    qkv_bias: Tensor | None
    mixture: Mixture | None
    latent: Latent | None


class _Mtp(NamedTuple):
    """`MtpWeights` as Paddle tensors."""

    emb_norm: Tensor
    hidden_norm: Tensor
    proj: Product | ScaledProduct
    layer: _Layer
    final_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPlan:
    """What every layer shares: rotation's `cos` and `sin`, and attention's.

    Attributes:
        cos, sin: f32[P, heads, rope_head_size].
    """

    cos: Tensor
    sin: Tensor
    attention: Any


class Model:
    """A loaded model over one attention backend; see `forward.ForwardModel`.

    Args:
        max_positions: rotation angles are tabulated for positions below this.
        n_mtp: load so many MTP layers, the first ones.
        reduce: completes what this rank's heads and part of the MLP add; None when they are all.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        attention: AttentionBackend[Any],
        max_positions: int,
        n_mtp: int,
        reduce: Reduce | None = None,
    ) -> None:
        self.shape = shape
        self._reduce = reduce or _whole
        self._attention = attention
        self._embed = as_tensor(weights.embed)
        self._layers = [_load_layer(shape, layer, i) for i, layer in enumerate(weights.layers)]
        self._mtp = [_load_mtp(shape, mtp, i) for i, mtp in enumerate(weights.mtp[:n_mtp])]
        assert len(self._mtp) == n_mtp, "the weights have fewer MTP layers"
        self._final_norm = as_tensor(weights.final_norm)
        self._lm_head = Product.of(weights.lm_head)
        self._cos, self._sin = _rope_tables(shape, max_positions)

    def plan(self, groups: tuple[TokenGroup, ...]) -> ForwardPlan:
        """Prepare a forward pass over `groups`; the MTP pass over the same tokens may reuse it."""
        positions = flat_positions(groups)
        heads = self.shape.n_heads + self.shape.n_kv_heads
        return ForwardPlan(
            cos=as_tensor(np.repeat(self._cos[positions, None], heads, axis=1)),
            sin=as_tensor(np.repeat(self._sin[positions, None], heads, axis=1)),
            attention=self._attention.plan(groups),
        )

    def forward(
        self,
        tokens: npt.NDArray[np.int64],
        plan: ForwardPlan,
        mark: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return f32[P, H], the hidden states before the final norm, of tokens i64[N].

        P is `layout.n_rows(N)`; rows behind N are padding, here and in all methods below.
        """
        x = paddle.gather(self._embed, as_tensor(pad_rows(tokens)))
        marked = marked_layers(len(self._layers), len(tokens))
        for index, layer in enumerate(self._layers):
            x = self._decoder_layer(x, layer, index, plan)
            if mark is not None and index + 1 in marked:
                mark(index + 1)
        return x

    def forward_mtp(
        self, tokens: npt.NDArray[np.int64], hidden: Tensor, plan: ForwardPlan, layer: int = 0
    ) -> Tensor:
        """Run an MTP layer over pairs (hidden state at i, token at i + 1 + layer).

        Args:
            tokens: i64[N], of each flat token the one that stands so far behind it.
            hidden: f32[P, H] from `mtp_input`.

        Returns:
            f32[P, H] before the MTP's final norm.
        """
        mtp, eps = self._mtp[layer], self.shape.rms_norm_eps
        embedded = paddle.gather(self._embed, as_tensor(pad_rows(tokens)))
        pair = [rms_norm(embedded, mtp.emb_norm, eps), rms_norm(hidden, mtp.hidden_norm, eps)]
        if self.shape.mtp_order == "hidden_embedding":
            pair.reverse()
        x = mtp.proj(paddle.concat(pair, axis=1))
        return self._decoder_layer(x, mtp.layer, len(self._layers) + layer, plan)

    def mtp_input(self, hidden: Tensor, layer: int | None = None) -> Tensor:
        """Return what MTP is fed for `hidden`: itself, or normed, as the model was trained."""
        if self.shape.mtp_hidden == "pre_norm":
            return hidden
        return rms_norm(hidden, self._norm(layer), self.shape.rms_norm_eps)

    def logits(self, hidden: Tensor, layer: int | None = None) -> Tensor:
        """Return f32[P, V] of hidden states f32[P, H] (before the norm)."""
        normed = rms_norm(hidden, self._norm(layer), self.shape.rms_norm_eps)
        return self._lm_head(normed)

    def select_rows(self, hidden: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return rows i64[R] of `hidden` f32[*, H] as f32[n_rows(R), H], padded with its row 0."""
        return paddle.gather(hidden, as_tensor(pad_rows(rows)))

    def broken_rows(self, hidden: Tensor, count: int) -> npt.NDArray[np.bool_]:
        """Return bool[count]: which of the first rows of f32[P, H] hold NaN or infinity.

        A sum tells at the price of one pass; only where it is not finite is the row looked at.
        """
        rows = np.asarray(np.from_dlpack(hidden), np.float32)[:count]
        with np.errstate(over="ignore", invalid="ignore"):
            broken = np.asarray(~np.isfinite(rows.sum(axis=1)))
        if broken.any():
            broken[broken] = ~np.isfinite(rows[broken]).all(axis=1)
        return broken

    def _norm(self, layer: int | None) -> Tensor:
        return self._final_norm if layer is None else self._mtp[layer].final_norm

    def _decoder_layer(self, x: Tensor, layer: _Layer, index: int, plan: ForwardPlan) -> Tensor:
        shape = self.shape
        normed = rms_norm(x, layer.input_norm, shape.rms_norm_eps)
        projected = layer.qkv(normed)
        if layer.qkv_bias is not None:
            projected = projected + layer.qkv_bias
        if layer.latent is not None:
            query, row = layer.latent.rows(projected, plan.cos, plan.sin)
            attended = self._attention.attend(plan.attention, index, query, row, None)
            return self._behind_attention(x, layer.latent.values(attended), layer)
        qk, value = paddle.split(projected, [shape.q_size + shape.kv_size, shape.kv_size], axis=1)
        qk = qk.reshape([-1, shape.n_heads + shape.n_kv_heads, shape.head_dim])
        if layer.qk_norm is not None:
            qk = self._norm_heads(qk, layer.qk_norm)
        query, key = paddle.split(
            rotate(qk, plan.cos, plan.sin), [shape.n_heads, shape.n_kv_heads], axis=1
        )
        attended = self._attention.attend(plan.attention, index, query, key, value)
        return self._behind_attention(x, attended, layer)

    def _behind_attention(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        shape = self.shape
        x = x + self._reduce(layer.o(attended))
        normed = rms_norm(x, layer.post_norm, shape.rms_norm_eps)
        return x + self._reduce(_feed_forward(normed, layer))

    def _norm_heads(self, qk: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Norm each head of f32[P, heads, head_dim], query heads first."""
        shape = self.shape
        parts = []
        for part, weight in zip(
            paddle.split(qk, [shape.n_heads, shape.n_kv_heads], axis=1), weights, strict=True
        ):
            rows = rms_norm(part.reshape([-1, shape.head_dim]), weight, shape.rms_norm_eps)
            parts.append(rows.reshape(part.shape))
        return paddle.concat(parts, axis=1)


def _feed_forward(x: Tensor, layer: _Layer) -> Tensor:
    """What each token's own experts make of it, and what every token takes."""
    parts = [part(x) for part in (layer.mixture, layer.mlp) if part is not None]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _whole(x: Tensor) -> Tensor:
    return x


def _rope_tables(
    shape: ModelShape, max_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cos and signed sin, f32[max_positions, rope_head_size]."""
    cos, sin = rope_tables(
        shape.rope_head_size,
        shape.rope_theta,
        shape.rope_scaling,
        max_positions,
        shape.rotated_size,
    )
    return np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)


def _load_mtp(shape: ModelShape, mtp: MtpWeights, index: int) -> _Mtp:
    return _Mtp(
        emb_norm=as_tensor(mtp.emb_norm),
        hidden_norm=as_tensor(mtp.hidden_norm),
        proj=product_of(mtp.proj),
        layer=_load_layer(shape, mtp.layer, shape.n_layers + index),
        final_norm=as_tensor(mtp.final_norm),
    )


def _load_layer(shape: ModelShape, layer: LayerWeights, index: int) -> _Layer:
    experts, mixture = shape.experts_of(index), layer.mixture
    mla, latent = shape.mla, layer.latent
    rewritten: Matrix
    if mla is None:
        rewritten = _rewrite_matrix(shape, layer.qkv)
    else:
        rewritten = rewrite_input(shape, mla, layer.qkv)
    return _Layer(
        input_norm=as_tensor(layer.input_norm),
        qkv=product_of(rewritten),
        o=product_of(layer.o),
        post_norm=as_tensor(layer.post_norm),
        mlp=Mlp.of(layer.mlp) if layer.mlp is not None else None,
        qk_norm=_rewrite_qk_norm(shape, layer.qk_norm) if layer.qk_norm is not None else None,
        qkv_bias=None
        if layer.qkv_bias is None
        else as_tensor(_rewrite_qkv(shape, layer.qkv_bias[None])),
        mixture=Mixture(experts, mixture) if experts and mixture is not None else None,
        latent=Latent(shape, mla, latent) if mla and latent is not None else None,
    )


def _rewrite_matrix(shape: ModelShape, qkv: Matrix) -> Matrix:
    if not isinstance(qkv, ScaledMatrix):
        return _rewrite_qkv(shape, qkv)
    values = _order_heads(shape, qkv.values)
    return ScaledMatrix(values, _rewrite_qkv(shape, qkv.scales), qkv.group)


def _rewrite_qkv(shape: ModelShape, qkv: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the columns f32[*, (n_heads + 2 * n_kv_heads) * head_dim] in the rewritten form."""
    out = _order_heads(shape, qkv)
    if not shape.has_qk_norm:
        out[:, : shape.q_size] *= np.float32(shape.head_dim**-0.5)
    return out


def _order_heads(shape: ModelShape, qkv: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a copy of these columns in which pairs that rotate are half a head apart."""
    rotated = shape.q_size + shape.kv_size
    out = qkv.copy()
    order = _head_order(shape)
    if order is not None:
        heads = np.arange(rotated).reshape(-1, shape.head_dim)
        out[:, :rotated] = qkv[:, heads[:, order].ravel()]
    return out


def _head_order(shape: ModelShape) -> npt.NDArray[np.int64] | None:
    """Return which element of a head stands where, so that pairs are half a head apart; None for
    heads that are so already.
    """
    elements = np.arange(shape.head_dim)
    if shape.rope_style == "interleaved":
        size = shape.rotated_size or shape.head_dim
        elements[:size] = np.concatenate([elements[0:size:2], elements[1:size:2]])
    elif not shape.rotated_size:
        return None
    return np.concatenate([elements[s] for s in stretches(shape.head_dim, shape.rotated_size)])


def _rewrite_qk_norm(
    shape: ModelShape, qk_norm: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
) -> tuple[Tensor, Tensor]:
    query, key = qk_norm
    order = _head_order(shape)
    if order is not None:
        query, key = query[order], key[order]
    return as_tensor(query * np.float32(shape.head_dim**-0.5)), as_tensor(key.copy())
