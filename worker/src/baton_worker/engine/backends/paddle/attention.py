"""Paged attention on the CPU, behind the seam where a CUDA backend would stand.

Owns how keys and values reach the pool and how a query reads its sequence back. The mask is always
explicit: Paddle's CPU `is_causal` aligns top-left, which is wrong when queries are fewer than keys.
Scores arrive scaled, because the model folds 1/sqrt(head_dim) into the query projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.backends.paddle.products import COLUMN_MULTIPLE
from baton_worker.engine.kv.layout import KEYS_AT_ONCE, MIN_KEYS, TokenGroup, kv_slots, n_rows
from baton_worker.engine.kv.pool import KvPool

_MASKED = np.float32(-1e9)

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """Attention over a paged pool.

    A backend prepares once per set of groups and then serves every layer with that plan.
    """

    def plan(self, groups: tuple[TokenGroup, ...]) -> PlanT:
        """Return what all layers share for these tokens."""

    def attend(
        self, plan: PlanT, layer: int, query: Tensor, key: Tensor, value: Tensor | None
    ) -> Tensor:
        """Store `key` and `value`, then attend causally over each token's own sequence.

        Args:
            query: f32[N, n_heads, head_dim], scaled and rotated.
            key, value: f32[N, kv_heads, head_dim]. None: of a compressed pool, where a value is the
                first elements of its key.

        Returns:
            f32[N, n_heads * head_dim]; of a compressed pool [N, n_heads * value_size].
        """


@dataclass(frozen=True, slots=True, eq=False)
class _GroupPlan:
    """What a group's attention needs in every layer, over T = blocks * block_size keys.

    Attributes:
        n_queries: query rows per sequence and KV head.
        pages: i64[S * kv_heads * blocks] pool pages in (sequence, head, block) order.
        value_pages: the same, cut at every `KEYS_AT_ONCE` keys.
        mask: f32[S, 1, 1, q_len, T], 0 or -1e9.
        query_padding, weight_padding: f32[S * kv_heads, missing, head_dim] and [.., missing, T]
            zeros that complete the rows to `layout.n_rows`, or None when they are complete.
    """

    n_sequences: int
    q_len: int
    n_queries: int
    pages: Tensor
    value_pages: tuple[Tensor, ...]
    mask: npt.NDArray[np.float32]
    query_padding: Tensor
    weight_padding: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """`write_rows`: i64[P * kv_heads], pool rows in (token, head) order, padding included."""

    write_rows: Tensor
    groups: tuple[_GroupPlan, ...]
    n_padding: int


class CpuPagedAttention:
    """Gathers whole pages and multiplies: matmul, softmax, matmul.

    Head-major blocks make the gathered keys contiguous per head, so no transpose follows.

    Args:
        value_size: how many elements of a compressed pool's rows are the value, the first ones; 0
            for values of their own.
    """

    def __init__(self, pool: KvPool, n_heads: int, value_size: int = 0) -> None:
        shape = pool.shape
        self._value_size = value_size or shape.head_dim
        self._shape = shape
        self._queries_per_head = n_heads // shape.kv_heads
        page = shape.block_size * shape.head_dim
        self._rows = [tuple(_alias(a, shape.head_dim) for a in own) for own in pool.layers]
        self._pages = [tuple(_alias(a, page) for a in own) for own in pool.layers]

    def plan(self, groups: tuple[TokenGroup, ...]) -> CpuPlan:
        """See `AttentionBackend.plan`."""
        heads = np.arange(self._shape.kv_heads)
        slots = kv_slots(groups, self._shape.block_size)
        rows = slots.block[:, None] * self._shape.kv_heads + heads
        rows = rows * self._shape.block_size + slots.offset[:, None]
        return CpuPlan(
            write_rows=as_tensor(rows.ravel()),
            groups=tuple(self._plan_group(group, heads) for group in groups),
            n_padding=len(rows) - sum(group.n_tokens for group in groups),
        )

    def attend(
        self, plan: CpuPlan, layer: int, query: Tensor, key: Tensor, value: Tensor | None
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        parts = (key,) if value is None else (key, value)
        for rows, part in zip(self._rows[layer], parts, strict=True):
            paddle.scatter_(rows, plan.write_rows, part.reshape([-1, self._shape.head_dim]))
        if len(plan.groups) == 1 and not plan.n_padding:
            return self._attend_group(plan.groups[0], layer, query)
        outputs, start = [], 0
        for group in plan.groups:
            stop = start + group.n_sequences * group.q_len
            outputs.append(self._attend_group(group, layer, query[start:stop]))
            start = stop
        if plan.n_padding:
            outputs.append(paddle.zeros([plan.n_padding, outputs[0].shape[1]]))
        return paddle.concat(outputs)

    def _plan_group(self, group: TokenGroup, heads: npt.NDArray[np.int64]) -> _GroupPlan:
        size = self._shape.block_size
        positions = group.positions()
        n_blocks = max(int(positions.max()) // size + 1, MIN_KEYS // size)
        blocks = group.tables[:, None, :n_blocks].astype(np.int64)
        pages = blocks * self._shape.kv_heads + heads[:, None]
        length, at_once = n_blocks * size, KEYS_AT_ONCE // size
        hidden = np.arange(length) > positions[:, None, None, :, None]
        n_queries = self._queries_per_head * group.q_len
        batch, missing = group.n_sequences * len(heads), n_rows(n_queries) - n_queries
        return _GroupPlan(
            n_sequences=group.n_sequences,
            q_len=group.q_len,
            n_queries=n_queries,
            pages=as_tensor(pages.ravel()),
            value_pages=tuple(
                as_tensor(pages[:, :, start : start + at_once].ravel())
                for start in range(0, n_blocks, at_once)
            ),
            mask=np.where(hidden, _MASKED, np.float32(0.0)),
            query_padding=_zeros(batch, missing, self._shape.head_dim),
            weight_padding=_zeros(batch, missing, length),
        )

    def _attend_group(self, group: _GroupPlan, layer: int, query: Tensor) -> Tensor:
        shape, n, q_len = self._shape, group.n_sequences, group.q_len
        batch = n * shape.kv_heads
        key_pages, value_pages = self._pages[layer][0], self._pages[layer][-1]
        keys = paddle.gather(key_pages, group.pages).reshape([batch, -1, shape.head_dim])
        if q_len > 1:
            query = query.reshape([n, q_len, -1, shape.head_dim]).transpose([0, 2, 1, 3])
        query = query.reshape([batch, group.n_queries, shape.head_dim])
        if group.query_padding is not None:
            query = paddle.concat([query, group.query_padding], axis=1)
        weights = self._weights(paddle.matmul(query, keys, transpose_y=True), group)
        output = self._weighted_sum(weights, value_pages, group)
        if output.shape[2] > self._value_size:
            output = output[:, :, : self._value_size]
        if group.weight_padding is not None:
            output = output[:, : group.n_queries]
        if q_len > 1:
            output = output.reshape([n, -1, q_len, self._value_size]).transpose([0, 2, 1, 3])
        return output.reshape([n * q_len, -1])

    def _weighted_sum(self, weights: Tensor, value_pages: Tensor, group: _GroupPlan) -> Tensor:
        """Return f32[batch, rows, *]: the values by their weights f32[batch, rows, T], and what
        zeros there are behind them.

        Keys are summed from the first on, so that those behind a sequence's own add exact zeros,
        however many the longest sequence beside it brings.
        """
        total = None
        for n, pages in enumerate(group.value_pages):
            values = paddle.gather(value_pages, pages)
            values = values.reshape([weights.shape[0], -1, self._shape.head_dim])
            if self._value_size < self._shape.head_dim:
                values = self._values_of(values)
            part = weights
            if len(group.value_pages) > 1:
                part = weights[:, :, n * KEYS_AT_ONCE : (n + 1) * KEYS_AT_ONCE]
            found = paddle.matmul(part, values)
            total = found if total is None else total + found
        return total

    def _values_of(self, rows: Tensor) -> Tensor:
        """Return f32[batch, T, *]: what of compressed rows f32[batch, T, head_dim] is the value,
        and zeros behind it, see `products.COLUMN_MULTIPLE`.
        """
        values, missing = rows[:, :, : self._value_size], -self._value_size % COLUMN_MULTIPLE
        if not missing:
            return values
        return paddle.concat([values, paddle.zeros([*rows.shape[:2], missing])], axis=2)

    def _weights(self, scores: Tensor, group: _GroupPlan) -> Tensor:
        """Mask and normalise scores f32[batch, rows, T]; padding rows stay out of the softmax.

        NumPy adds the broadcast mask 20 times faster than Paddle's CPU broadcast.
        """
        length, n_queries = group.mask.shape[-1], group.n_queries
        view = np.asarray(np.from_dlpack(scores), np.float32)[:, :n_queries]
        view = view.reshape(group.n_sequences, self._shape.kv_heads, -1, group.q_len, length)
        if group.weight_padding is None:
            np.add(view, group.mask, out=view)
            return paddle.nn.functional.softmax(scores)
        masked = as_tensor((view + group.mask).reshape(-1, n_queries, length))
        weights = paddle.nn.functional.softmax(masked)
        return paddle.concat([weights, group.weight_padding], axis=1)


def _zeros(batch: int, rows: int, width: int) -> Tensor:
    return paddle.zeros([batch, rows, width]) if rows else None


def _alias(array: npt.NDArray[np.float32], width: int) -> Tensor:
    """Return a Paddle tensor `[*, width]` over the same memory."""
    return as_tensor(array.reshape(-1, width))
