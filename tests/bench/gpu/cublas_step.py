"""The baseline: a decode or prefill step as PyTorch computes it, in whatever order of sums.

cuBLAS for products, the quickest backend of scaled_dot_product_attention over dense keys and
values, small Triton kernels for norms, rotation and activation. Greedy, without logprobs: what
a step costs where nothing is promised. Works on the weights of the engine under test.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@triton.jit
def _add_norm(x, residual, weight, out, eps, n: tl.constexpr, adds: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * n
    column = tl.arange(0, n)
    value = tl.load(residual + row + column).to(tl.float32)
    if adds:
        value += tl.load(x + row + column).to(tl.float32)
        tl.store(residual + row + column, value.to(tl.bfloat16))
    scale = tl.rsqrt(tl.sum(value * value) / n + eps)
    tl.store(out + row + column, (value * scale * tl.load(weight + column)).to(tl.bfloat16))


@triton.jit
def _gate(gate_up, out, inner: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(gate_up + row * 2 * inner + column).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column).to(tl.float32)
    tl.store(out + row * inner + column, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16))


@triton.jit
def _rotate_store(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, query, k, v, positions, eps, log2_theta, rows_a_sequence, context,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, dim // 2)
    base = qkv + (token * (heads + 2 * kv_heads) + head) * dim
    first = tl.load(base + column).to(tl.float32)
    second = tl.load(base + dim // 2 + column).to(tl.float32)
    position = tl.load(positions + token)
    if head < heads + kv_heads:
        weight = q_norm if head < heads else k_norm
        scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / dim + eps)
        first = first * scale * tl.load(weight + column)
        second = second * scale * tl.load(weight + dim // 2 + column)
        angle = position * tl.exp2(-(column.to(tl.float32) * 2 / dim) * log2_theta)
        turned = first * tl.cos(angle) - second * tl.sin(angle)
        second = second * tl.cos(angle) + first * tl.sin(angle)
        first = turned
    if head < heads:
        sequence, row = token // rows_a_sequence, token % rows_a_sequence
        to = query + ((sequence * heads + head) * rows_a_sequence + row) * dim
    else:
        which = k if head < heads + kv_heads else v
        at = (token // rows_a_sequence * kv_heads + (head - heads) % kv_heads) * context
        to = which + (at + position) * dim
    tl.store(to + column, first.to(tl.bfloat16))
    tl.store(to + dim // 2 + column, second.to(tl.bfloat16))


class CublasStep:
    """A step of `batch` sequences with `rows` tokens each, the last of `context` positions.

    Args:
        weights: as `DeviceWeights`, bfloat16.
        shape: as `ModelShape`, with norms of query and key heads.
        head_rows: rows a sequence that go through the head: all, or only the last.
    """

    def __init__(
        self, weights: Any, shape: Any, batch: int, rows: int, context: int, all_rows: bool = True
    ) -> None:
        self._weights, self._shape = weights, shape
        self._batch, self._rows, self._context = batch, rows, context
        self._all_rows = all_rows
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        n, hidden = batch * rows, shape.hidden_size

        def empty(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, **kind)

        self._tokens = torch.randint(shape.vocab_size, (n,), device="cuda")
        self._positions = torch.arange(context - rows, context, device="cuda").repeat(batch).int()
        self._x, self._residual, self._normed = (empty(n, hidden) for _ in range(3))
        self._qkv = empty(n, shape.q_size + 2 * shape.kv_size)
        self._query = empty(batch, shape.n_heads, rows, shape.head_dim)
        self._gate_up = empty(n, 2 * shape.intermediate_size)
        self._gated = empty(n, shape.intermediate_size)
        head_rows = n if all_rows else batch
        self._logits = empty(head_rows, shape.vocab_size)
        cache = (batch, shape.n_kv_heads, context, shape.head_dim)
        self._kv = [
            tuple(torch.randn(cache, **kind) for _ in range(2)) for _ in range(shape.n_layers)
        ]
        self._causal = rows == context

    def run(self, _: int = 0) -> torch.Tensor:
        """Launch it and return i64 tokens, one a row of the head."""
        weights, eps = self._weights, self._shape.rms_norm_eps
        torch.index_select(weights.embed, 0, self._tokens, out=self._residual)
        self._norm(None, weights.layers[0].input_norm)
        norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for layer, (k, v), norm in zip(weights.layers, self._kv, norms, strict=True):
            torch.mm(self._normed, layer.qkv.t(), out=self._qkv)
            self._rotate(layer, k, v, eps)
            torch.mm(self._attended(k, v), layer.o.t(), out=self._x)
            self._norm(self._x, layer.post_norm)
            torch.mm(self._normed, layer.gate_up.t(), out=self._gate_up)
            inner = self._shape.intermediate_size
            _gate[(len(self._gated), inner // 1024)](self._gate_up, self._gated, inner, 1024)
            torch.mm(self._gated, layer.down.t(), out=self._x)
            self._norm(self._x, norm)
        last = self._normed if self._all_rows else self._normed[self._rows - 1 :: self._rows]
        torch.mm(last, weights.lm_head.t(), out=self._logits)
        return self._logits.argmax(-1)

    def _norm(self, x: torch.Tensor | None, weight: torch.Tensor) -> None:
        n, hidden = self._residual.shape
        added = self._residual if x is None else x
        _add_norm[(n,)](
            added, self._residual, weight, self._normed, self._shape.rms_norm_eps, hidden,
            x is not None, num_warps=8,
        )  # fmt: skip

    def _rotate(self, layer: Any, k: torch.Tensor, v: torch.Tensor, eps: float) -> None:
        shape = self._shape
        grid = (len(self._positions), shape.n_heads + 2 * shape.n_kv_heads)
        log2_theta = math.log2(shape.rope_theta)
        _rotate_store[grid](
            self._qkv, *layer.qk_norm, self._query, k, v, self._positions, eps, log2_theta,
            self._rows, self._context, shape.n_heads, shape.n_kv_heads, shape.head_dim, num_warps=1,
        )  # fmt: skip

    def _attended(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Without a mask queries of a step see each other, which costs what the causal mask does.
        with sdpa_kernel(BACKENDS, set_priority=True):
            out = functional.scaled_dot_product_attention(
                self._query, k, v, is_causal=self._causal, enable_gqa=True
            )
        return out.transpose(1, 2).reshape(-1, self._shape.q_size)
