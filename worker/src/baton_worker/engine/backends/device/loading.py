"""A checkpoint's tensors on their way to the device, one after the other.

Owns the copy: from the mapped file through two pieces of page-locked memory, converted on the way,
while the device takes the piece before. So the host never holds more of a model than those, and
what is fused is written in parts into its place. Knows no framework.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.seam import Device, DType, Event, Tensor
from baton_worker.engine.backends.device.weights import (
    DeviceLatent,
    DeviceLayer,
    DeviceMixture,
    DeviceMtp,
    DeviceWeights,
)
from baton_worker.engine.model import naming
from baton_worker.engine.model.checkpoint import StoredTensor, identity
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.reading import CheckedReader
from baton_worker.engine.model.rope import stretches
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import WHOLE, Shard, head_rows

log = logging.getLogger(__name__)

_PIECE_BYTES = 32 << 20
_THREADS = 4
_TOLD_SECONDS = 5.0
_Rows = tuple[str, tuple[int, ...], slice]
"""A key, the shape that its tensor must have, and which rows of it."""

_HOST_TYPES: dict[DType, type[np.generic]] = {"bfloat16": np.uint16, "float32": np.float32}


def model_dtype(checkpoint: Mapping[str, StoredTensor], wanted: str) -> DType:
    """Return E: `wanted`, or for auto what the checkpoint's embeddings are stored as.

    F16 becomes bfloat16, of which there are kernels: range kept, three bits of each value lost.
    """
    if wanted != "auto":
        return "float32" if wanted == "float32" else "bfloat16"
    embed = checkpoint.get(naming.EMBED)
    return "float32" if embed is not None and embed.dtype == "F32" else "bfloat16"


def load_device_weights(
    device: Device,
    checkpoint: Mapping[str, StoredTensor],
    model_shape: ModelShape,
    dtype: DType,
    n_mtp: int,
    shard: Shard = WHOLE,
) -> DeviceWeights:
    """Copy a checkpoint, or a rank's part of it, to the device as E.

    Args:
        dtype: E, bfloat16 or float32.
        n_mtp: how many of the model's MTP layers are wanted there; the others are only checked.
        shard: which part; nothing else of what is cut is read.

    Raises:
        CheckpointError: a key is missing, unknown or of another shape than `model_shape` says, or
            a copy differs from its original; the message names it.
        DeviceError: the device has no memory left for a tensor.
    """
    checked = CheckedReader(checkpoint, model_shape)
    pieces = _Pieces(device, _Progress(sum(t.raw.nbytes for t in checkpoint.values())))
    main = _Layers(checked, model_shape, shard, _Copies(device, dtype, pieces))
    embed = main.tensor(naming.EMBED, (model_shape.vocab_size, model_shape.hidden_size))
    final_norm = main.norm(naming.FINAL_NORM)
    weights = DeviceWeights(
        dtype=dtype,
        embed=embed,
        layers=tuple(main.layer(naming.main_layer(i), i) for i in range(model_shape.n_layers)),
        mtp=tuple(main.mtp(i, final_norm) for i in range(min(n_mtp, model_shape.n_mtp_layers))),
        final_norm=final_norm,
        lm_head=main.head(embed, device),
        identity=identity(checkpoint),
    )
    unwanted = _Layers(checked, model_shape, shard, _nowhere)
    for index in range(n_mtp, model_shape.n_mtp_layers):
        unwanted.mtp(index, final_norm)
    checked.refuse_unread()
    device.synchronise()
    pieces.close()
    return weights


class Place(Protocol):
    """Makes one tensor of stored ones."""

    def __call__(
        self, parts: tuple[StoredTensor, ...], n_rows: int = 0, dtype: DType | None = None
    ) -> Tensor:
        """Return them joined by rows, and rows of zeros behind them up to so many; E if no dtype
        is told.
        """


class _Layers:
    """Reads a model's tensors in the layout of `weights`, and has each placed.

    Args:
        place: where they go.
    """

    def __init__(
        self,
        checked: CheckedReader,
        model_shape: ModelShape,
        shard: Shard,
        place: Place,
    ) -> None:
        self._checked = checked
        self._model_shape = model_shape
        self._shard = shard
        self._place = place

    def tensor(self, key: str, shape: tuple[int, ...]) -> Tensor:
        return self._place((self._checked.stored(key, shape),))

    def rows(self, *parts: _Rows) -> Tensor:
        """Place some rows of each."""
        stored = [self._checked.stored(key, shape).part(rows) for key, shape, rows in parts]
        return self._place(tuple(stored))

    def columns(self, key: str, width: int) -> Tensor:
        """Place this rank's columns of `[H, width]`."""
        stored = self._checked.stored(key, (self._model_shape.hidden_size, width))
        return self._place((stored.part(columns=self._shard.part(width)),))

    def norm(self, key: str) -> Tensor:
        return self.tensor(key, (self._model_shape.hidden_size,))

    def layer(self, keys: naming.LayerKeys, index: int) -> DeviceLayer:
        model_shape = self._model_shape
        experts, width = model_shape.experts_of(index), model_shape.mlp_size(index)
        mlp = keys.shared if experts else keys.mlp
        mla = model_shape.mla
        return DeviceLayer(
            input_norm=self.norm(keys.input_norm),
            qkv=self._latent_input(keys, mla) if mla else self._qkv(keys),
            o=self.columns(keys.o, model_shape.o_size),
            post_norm=self.norm(keys.post_norm),
            gate_up=self.rows(*self._gate_up(mlp, width)) if width else None,
            down=self.columns(mlp.down, width) if width else None,
            qk_norm=self._qk_norm(keys) if model_shape.has_qk_norm else None,
            qkv_bias=self._qkv_bias(keys) if model_shape.has_qkv_bias else None,
            mixture=self._mixture(keys, experts) if experts else None,
            latent=self._latent(keys, mla) if mla else None,
        )

    def _latent_input(self, keys: naming.LayerKeys, mla: Mla) -> Tensor:
        hidden, (query, row) = self._model_shape.hidden_size, self._model_shape.projected_sizes
        kept = (keys.kv_down, (row, hidden), slice(0, row))
        if mla.q_rank:
            return self.rows((keys.query_down, (query, hidden), slice(0, query)), kept)
        return self.rows((keys.query, (query, hidden), self._shard.part(query)), kept)

    def _latent(self, keys: naming.LayerKeys, mla: Mla) -> DeviceLatent:
        def heads(key: str, size: int, rank: int) -> Tensor:
            width = self._model_shape.n_heads * size
            return self.rows((key, (width, rank), self._shard.part(width)))

        rank = mla.q_rank
        return DeviceLatent(
            q_norm=self.tensor(keys.query_norm, (rank,)) if rank else None,
            q_up=heads(keys.query_up, mla.query_size, rank) if rank else None,
            kv_norm=self.tensor(keys.kv_norm, (mla.kv_rank,)),
            kv_up=heads(keys.kv_up, mla.unfolded_size, mla.kv_rank),
        )

    def _gate_up(self, keys: naming.MlpKeys, width: int) -> list[_Rows]:
        shape = (width, self._model_shape.hidden_size)
        return [(key, shape, self._shard.part(width)) for key in keys.gate_up]

    def _mixture(self, keys: naming.LayerKeys, experts: Experts) -> DeviceMixture:
        hidden, width = self._model_shape.hidden_size, experts.intermediate_size
        self._checked.refuse_fused(keys)
        each = [keys.expert(i) for i in range(experts.count)]
        own, bias = self._shard.part(width), self._checked.choice_bias(keys, experts)
        down = [self._checked.stored(mlp.down, (hidden, width)).part(columns=own) for mlp in each]
        router = self._checked.stored(keys.router, (experts.count, hidden))
        return DeviceMixture(
            router=self._place((router,), dtype="float32"),
            choice_bias=None if bias is None else self._place((bias,), dtype="float32"),
            gate_up=self.rows(*(part for mlp in each for part in self._gate_up(mlp, width))),
            down=self._place(tuple(down)),
        )

    def _qkv(self, keys: naming.LayerKeys) -> Tensor:
        hidden = self._model_shape.hidden_size
        parts = zip(keys.qkv, self._qkv_rows(), strict=True)
        return self.rows(
            *((key, (width, hidden), rows) for key, (width, own) in parts for rows in own)
        )

    def _qkv_rows(self) -> tuple[tuple[int, list[slice]], ...]:
        """Return how many rows query, key and value have, and which are this rank's, in the order
        in which heads are rotated.
        """
        model_shape = self._model_shape
        heads, dim = self._shard.kv_heads(model_shape.n_kv_heads), model_shape.head_dim
        kv = slice(heads.start * dim, heads.stop * dim)
        query = self._in_order(self._shard.part(model_shape.q_size))
        kv_size = model_shape.kv_size
        return (model_shape.q_size, query), (kv_size, self._in_order(kv)), (kv_size, [kv])

    def _in_order(self, rows: slice) -> list[slice]:
        """Return rows of whole heads in the order of `stretches`."""
        parts, dim = self._stretches(), self._model_shape.head_dim
        if len(parts) == 1:
            return [rows]
        heads = range(rows.start, rows.stop, dim)
        return [slice(at + part.start, at + part.stop) for at in heads for part in parts]

    def _stretches(self) -> tuple[slice, ...]:
        """Return those of a head; neighbours that rotate together stay where they are."""
        model_shape = self._model_shape
        is_partial = model_shape.rope_style == "half" and model_shape.rotated_size
        return stretches(model_shape.head_dim, model_shape.rotated_size if is_partial else 0)

    def mtp(self, index: int, shared_norm: Tensor) -> DeviceMtp:
        hidden = self._model_shape.hidden_size
        keys = self._checked.mtp_keys(index)
        has_own_norm = self._checked.has_own_norm(keys)
        return DeviceMtp(
            emb_norm=self.norm(keys.emb_norm),
            hidden_norm=self.norm(keys.hidden_norm),
            proj=self.tensor(keys.proj, (hidden, 2 * hidden)),
            layer=self.layer(keys.layer, self._model_shape.n_layers + index),
            final_norm=self.norm(keys.final_norm) if has_own_norm else shared_norm,
        )

    def head(self, embed: Tensor, device: Device) -> Tensor:
        model_shape = self._model_shape
        whole, size = (model_shape.vocab_size, model_shape.hidden_size), self._shard.size
        ids, n_rows = self._shard.vocabulary(whole[0]), head_rows(whole[0], size)
        key = naming.LM_HEAD
        if model_shape.tie_word_embeddings:
            self._checked.check_copy(naming.LM_HEAD, naming.EMBED)
            if size == 1:
                return embed
            if ids.stop - ids.start == n_rows:
                return device.rows(embed, ids.start, ids.stop)
            key = naming.EMBED
        return self._place((self._checked.stored(key, whole).part(ids),), n_rows)

    def _qkv_bias(self, keys: naming.LayerKeys) -> Tensor:
        parts = zip(keys.qkv_bias, self._qkv_rows(), strict=True)
        return self.rows(*((key, (width,), rows) for key, (width, own) in parts for rows in own))

    def _qk_norm(self, keys: naming.LayerKeys) -> tuple[Tensor, Tensor]:
        query, key = keys.qk_norm
        shape, parts = (self._model_shape.head_dim,), self._stretches()
        return (
            self.rows(*((query, shape, part) for part in parts)),
            self.rows(*((key, shape, part) for part in parts)),
        )


def _nowhere(
    parts: tuple[StoredTensor, ...], n_rows: int = 0, dtype: DType | None = None
) -> Tensor:
    return None


class _Copies:
    """Places stored tensors in new memory of the device."""

    def __init__(self, device: Device, dtype: DType, pieces: _Pieces) -> None:
        self._device = device
        self._dtype = dtype
        self._pieces = pieces

    def __call__(
        self, parts: tuple[StoredTensor, ...], n_rows: int = 0, dtype: DType | None = None
    ) -> Tensor:
        dtype = dtype or self._dtype
        n_stored = sum(part.shape[0] for part in parts)
        shape = (max(n_stored, n_rows), *parts[0].shape[1:])
        make = self._device.zeros if n_stored < n_rows else self._device.empty
        tensor = make(shape, dtype)
        start = 0
        for part in parts:
            stop = start + part.shape[0]
            self._pieces.send(part, self._device.rows(tensor, start, stop), dtype)
            start = stop
        return tensor


class _Piece(NamedTuple):
    """Page-locked memory, and the point at which its last content has been taken."""

    memory: npt.NDArray[np.uint8]
    taken: Event


class _Pieces:
    """Sends stored tensors to memory of the device, in turns from two pieces of the host's."""

    def __init__(self, device: Device, progress: _Progress) -> None:
        self._device = device
        self._progress = progress
        self._threads = ThreadPoolExecutor(_THREADS, "weights")
        self._next, self._after = (
            _Piece(device.host(_PIECE_BYTES), device.record()) for _ in range(2)
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def send(self, stored: StoredTensor, to: Tensor, dtype: DType) -> None:
        stored.require_float()
        kind = np.dtype(_HOST_TYPES[dtype])
        n_rows, width = stored.shape[0], math.prod(stored.shape[1:])
        row_bytes = width * kind.itemsize
        if row_bytes > self._next.memory.nbytes:
            self._grow(row_bytes)
        step = self._next.memory.nbytes // row_bytes
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            self._send_rows(stored, rows, self._device.rows(to, rows.start, rows.stop), kind)
        self._progress.add(stored.raw.nbytes)

    def _send_rows(
        self, stored: StoredTensor, rows: slice, to: Tensor, kind: np.dtype[Any]
    ) -> None:
        piece = self._next
        piece.taken.wait()
        size = stored.raw[rows].size
        host = piece.memory[: size * kind.itemsize].view(kind)
        host = host.reshape(-1, *stored.shape[1:])
        self._fill(host, stored, rows)
        self._device.upload(host, to)
        sent = _Piece(piece.memory, self._device.record())
        self._next, self._after = self._after, sent

    def _fill(self, host: npt.NDArray[Any], stored: StoredTensor, rows: slice) -> None:
        """Write rows to host memory, a part on each thread: NumPy and page faults need no GIL."""
        step = -(-len(host) // _THREADS)
        starts = range(0, len(host), step)
        parts = [slice(rows.start + at, min(rows.start + at + step, rows.stop)) for at in starts]
        places = [host[at : at + step] for at in starts]
        list(self._threads.map(stored.write_to, places, parts))

    def _grow(self, n_bytes: int) -> None:
        self._device.synchronise()
        self._next, self._after = (
            _Piece(self._device.host(n_bytes), self._device.record()) for _ in range(2)
        )


class _Progress:
    """Tells the log how far a long load has come."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = total
        self._done = 0
        self._told_at = clock()

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        now = self._clock()
        if now - self._told_at >= _TOLD_SECONDS:
            self._told_at = now
            share = round(100 * self._done / max(self._total, 1))
            log.info(
                "loading weights",
                extra={"bytes_read": self._done, "bytes": self._total, "percent": share},
            )
