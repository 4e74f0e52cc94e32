"""`LatentKernels` over NumPy, float32 as E: what each must compute, token by token.

Sums are float64's, each row's by itself from memory that lies alike, so that a token's bits do not
depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing.numpy_device import NumpyTensor
from baton_worker.engine.backends.device.seam import Places, Rotation
from baton_worker.engine.kv.pool import NULL_BLOCK, TRASH_BLOCK
from baton_worker.engine.model.mla import Mla

Array = npt.NDArray[Any]


class NumpyLatentKernels:
    """See `latent_kernels.LatentKernels`; `launch` puts a call on the device's stream."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def norm(self, x: NumpyTensor, weight: NumpyTensor, eps: float, out: NumpyTensor) -> None:
        """See `LatentKernels.norm`."""
        self._launch(_norm, x, weight, eps, out)

    def fold(self, queries: NumpyTensor, kv_up: NumpyTensor, mla: Mla, out: NumpyTensor) -> None:
        """See `LatentKernels.fold`."""
        self._launch(_fold, queries, kv_up, mla, out)

    def rotate(
        self,
        queries: NumpyTensor,
        rotation: Rotation,
        places: Places,
        mla: Mla,
        query: NumpyTensor,
    ) -> None:
        """See `LatentKernels.rotate`."""
        self._launch(_rotate, queries, rotation, places, mla, query)

    def store(
        self,
        row: NumpyTensor,
        norm: NumpyTensor,
        rotation: Rotation,
        places: Places,
        kv: NumpyTensor,
        layer: int,
    ) -> None:
        """See `LatentKernels.store`."""
        self._launch(_store, row, norm, rotation, places, kv, layer)

    def attend(
        self,
        query: NumpyTensor,
        kv: NumpyTensor,
        layer: int,
        tables: NumpyTensor,
        contexts: NumpyTensor,
        scale: float,
        out: NumpyTensor,
        scratch: NumpyTensor,
    ) -> None:
        """See `LatentKernels.attend`."""
        self._launch(_attend, query, kv, layer, tables, contexts, scale, out, scratch)

    def unfold(self, attended: NumpyTensor, kv_up: NumpyTensor, mla: Mla, out: NumpyTensor) -> None:
        """See `LatentKernels.unfold`."""
        self._launch(_unfold, attended, kv_up, mla, out)


@np.errstate(invalid="ignore", over="ignore")
def _normed(row: Array, weight: Array, eps: float) -> Array:
    wide = row.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide * wide).sum() / len(wide) + eps) * weight)


@np.errstate(invalid="ignore", over="ignore")
def _norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    for token, row in enumerate(x):
        out[token] = _normed(row, weight, eps)


def _matrices(kv_up: Array, mla: Mla) -> Array:
    """Return each head's f64[nope_size + value_size, kv_rank]."""
    return kv_up.astype(np.float64).reshape(-1, mla.unfolded_size, mla.kv_rank)


@np.errstate(invalid="ignore", over="ignore")
def _fold(queries: Array, kv_up: Array, mla: Mla, out: Array) -> None:
    keys = _matrices(kv_up, mla)[:, : mla.nope_size]
    assert out.shape == (len(queries), len(keys), mla.row_size), out.shape
    for token, row in enumerate(queries):
        heads = row.astype(np.float64).reshape(len(keys), mla.query_size)[:, : mla.nope_size]
        out[token, :, : mla.kv_rank] = (heads[:, None] @ keys)[:, 0]


@np.errstate(invalid="ignore", over="ignore")
def _unfold(attended: Array, kv_up: Array, mla: Mla, out: Array) -> None:
    values = _matrices(kv_up, mla)[:, mla.nope_size :]
    for token, heads in enumerate(attended.astype(np.float64)):
        out[token] = (values @ heads[..., None]).ravel()


@np.errstate(invalid="ignore", over="ignore")
def _turned(part: Array, cos: Array, sin: Array, style: str) -> Array:
    """Rotate f[..., rope_size] by pairs, each a complex number."""
    half = part.shape[-1] // 2
    first, second = (
        (slice(None, half), slice(half, None))
        if style == "half"
        else (slice(0, None, 2), slice(1, None, 2))
    )
    pairs = part[..., first].astype(np.float64) + 1j * part[..., second]
    turned = pairs * (cos.astype(np.float64) + 1j * sin)
    out = np.empty(part.shape, np.float64)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def _check(rotation: Rotation) -> None:
    assert rotation.norms is None, "compressed rows are normed, no heads"
    assert rotation.bias is None, "no such model has one"


@np.errstate(invalid="ignore", over="ignore")
def _rotate(queries: Array, rotation: Rotation, places: Places, mla: Mla, query: Array) -> None:
    _check(rotation)
    for token, row in enumerate(queries):
        if places.sequence[token] >= 0:
            position = int(places.position[token])
            heads = row.reshape(-1, mla.query_size)[:, mla.nope_size :]
            angles = rotation.cos[position], rotation.sin[position]
            query[token, :, mla.kv_rank :] = _turned(heads, *angles, rotation.style)


@np.errstate(invalid="ignore", over="ignore")
def _store(
    row: Array, norm: Array, rotation: Rotation, places: Places, kv: Array, layer: int
) -> None:
    _check(rotation)
    assert kv.shape[2:4] == (1, 1), kv.shape
    block_size, rank = kv.shape[4], len(norm)
    for token, whole in enumerate(row):
        sequence, position = int(places.sequence[token]), int(places.position[token])
        if sequence < 0:
            continue
        column, offset = divmod(position, block_size)
        table = places.tables[sequence]
        block = int(table[column]) if column < len(table) else NULL_BLOCK
        to = kv[TRASH_BLOCK if block == NULL_BLOCK else block, layer, 0, 0, offset]
        angles = rotation.cos[position], rotation.sin[position]
        to[:rank] = _normed(whole[:rank], norm, rotation.eps)
        to[rank:] = _turned(whole[rank:], *angles, rotation.style)


@np.errstate(invalid="ignore", over="ignore")
def _attend(
    query: Array,
    kv: Array,
    layer: int,
    tables: Array,
    contexts: Array,
    scale: float,
    out: Array,
    scratch: Array,
) -> None:
    q_len, rest = divmod(len(query), len(tables))
    assert not rest, (len(query), len(tables))
    width = out.shape[2]
    for sequence, context in enumerate(contexts.tolist()):
        if context <= 0:
            continue
        n_blocks = -(-context // kv.shape[4])
        assert q_len <= context, (q_len, context)
        assert n_blocks <= tables.shape[1], (context, tables.shape)
        kept = kv[tables[sequence, :n_blocks], layer, 0, 0].reshape(-1, kv.shape[5])
        kept = kept.astype(np.float64)
        for j in range(q_len):
            token, last = sequence * q_len + j, context - q_len + j + 1
            rows = kept[:last]
            scores = query[token].astype(np.float64) @ rows.T * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            total = weights.sum(axis=1)[:, None]
            out[token] = weights @ rows[:, :width] / total
