"""A checkpoint's tensors on their way to the device: what goes where, asked for twice.

Owns the order. At first nothing is copied: each key is looked up, so that what does not fit is
refused before the device is given a byte, and the bytes are counted. Then each tensor is made on
the device and what belongs into it is sent through `staging`; what is fused is written in parts
into its place. Knows no framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from baton_worker.engine.backends.device.placing import (
    MultipliedOut,
    Part,
    ScaledParts,
    stored_parts,
)
from baton_worker.engine.backends.device.scaled_kernels import Scaled, Weight
from baton_worker.engine.backends.device.seam import Device, DType, Tensor
from baton_worker.engine.backends.device.staging import Source, Staging
from baton_worker.engine.backends.device.weights import (
    DeviceLatent,
    DeviceLayer,
    DeviceMixture,
    DeviceMtp,
    DeviceWeights,
)
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.model import naming
from baton_worker.engine.model.checkpoint import StoredTensor, identity
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.reading import CheckedReader
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import WHOLE, Shard, head_rows

_Stored = StoredTensor | MultipliedOut
_Rows = tuple[str, tuple[int, ...], slice]
"""A key, the shape that its tensor must have, and which rows of it."""


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
    progress: LoadProgress | None = None,
) -> DeviceWeights:
    """Copy a checkpoint, or a rank's part of it, to the device as E.

    Args:
        dtype: E, bfloat16 or float32.
        n_mtp: how many of the model's MTP layers are wanted there; the others are only checked.
        shard: which part. Of what is cut by rows nothing else is read. What is cut by columns is
            read in whole rows, for its gaps lie between: all ranks are of one host, whose page
            cache has them once.
        progress: is told how far it has come, None for the log alone.

    Raises:
        CheckpointError: a key is missing, unknown or of another shape than `model_shape` says, or
            a copy differs from its original, before anything is copied; or a file cannot be read.
            The message names key and file.
        DeviceError: the device has no memory left for a tensor.
    """
    checked = CheckedReader(checkpoint, model_shape)
    counted = _Counted()
    _read_all(_Layers(checked, model_shape, shard, counted), model_shape, n_mtp, dtype)
    unwanted = _Layers(checked, model_shape, shard, _Counted())
    for index in range(n_mtp, model_shape.n_mtp_layers):
        unwanted.mtp(index, None)
    checked.refuse_unread()
    progress = progress or LoadProgress()
    progress.begin(counted.n_bytes)
    with Staging(device, progress.add) as staging:
        copies = _Copies(device, dtype, staging)
        weights = _read_all(_Layers(checked, model_shape, shard, copies), model_shape, n_mtp, dtype)
        staging.finish()
    weights = dataclasses.replace(weights, identity=identity(checkpoint))
    progress.finish()
    return weights


def _read_all(layers: _Layers, model_shape: ModelShape, n_mtp: int, dtype: DType) -> DeviceWeights:
    """Have everything placed that is wanted; the identity is not told yet."""
    embed = layers.tensor(naming.EMBED, (model_shape.vocab_size, model_shape.hidden_size))
    final_norm = layers.norm(naming.FINAL_NORM)
    return DeviceWeights(
        dtype=dtype,
        embed=embed,
        layers=tuple(layers.layer(naming.main_layer(i), i) for i in range(model_shape.n_layers)),
        mtp=tuple(layers.mtp(i, final_norm) for i in range(min(n_mtp, model_shape.n_mtp_layers))),
        final_norm=final_norm,
        lm_head=layers.head(embed),
        identity="",
    )


class Place(Protocol):
    """Makes one tensor of stored ones."""

    def __call__(
        self, parts: tuple[_Stored, ...], n_rows: int = 0, dtype: DType | None = None
    ) -> Tensor:
        """Return them joined by rows, and rows of zeros behind them up to so many; E if no dtype
        is told.
        """

    def scaled(self, parts: ScaledParts) -> Scaled:
        """Return them joined by rows."""

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return rows of one that was made."""


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

    def matrix(self, parts: Sequence[Part], as_stored: bool = False) -> Weight:
        """Place parts of a decoder layer's matrices, which may be quantised; see `stored_parts`."""
        quantisation = self._model_shape.quantisation
        found = stored_parts(self._checked, quantisation, parts, as_stored)
        return self._place.scaled(found) if isinstance(found, ScaledParts) else self._place(found)

    def multiplied_out(self, part: Part) -> Tensor:
        """Place a part of a matrix as E, though it may be quantised."""
        quantisation = self._model_shape.quantisation
        found = stored_parts(self._checked, quantisation, [part], by_row=True)
        if isinstance(found, ScaledParts):
            assert quantisation is not None, "what has scales is quantised"
            return self._place(found.multiplied_out(quantisation.group_of(part.shape[1])))
        return self._place(found)

    def columns(self, key: str, width: int) -> Part:
        """Return this rank's columns of `[H, width]`."""
        shape = (self._model_shape.hidden_size, width)
        return Part(key, shape, columns=self._shard.part(width))

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
            o=self.matrix([self.columns(keys.o, model_shape.o_size)]),
            post_norm=self.norm(keys.post_norm),
            gate_up=self.matrix(self._gate_up(mlp, width)) if width else None,
            down=self.matrix([self.columns(mlp.down, width)]) if width else None,
            qk_norm=self._qk_norm(keys) if model_shape.has_qk_norm else None,
            qkv_bias=self._qkv_bias(keys) if model_shape.has_qkv_bias else None,
            mixture=self._mixture(keys, experts) if experts else None,
            latent=self._latent(keys, mla) if mla else None,
        )

    def _latent_input(self, keys: naming.LayerKeys, mla: Mla) -> Weight:
        hidden, (query, row) = self._model_shape.hidden_size, self._model_shape.projected_sizes
        kept = Part(keys.kv_down, (row, hidden))
        if mla.q_rank:
            return self.matrix([Part(keys.query_down, (query, hidden)), kept])
        return self.matrix([Part(keys.query, (query, hidden), self._shard.part(query)), kept])

    def _latent(self, keys: naming.LayerKeys, mla: Mla) -> DeviceLatent:
        def heads(key: str, size: int, rank: int) -> Part:
            width = self._model_shape.n_heads * size
            return Part(key, (width, rank), self._shard.part(width))

        rank = mla.q_rank
        return DeviceLatent(
            q_norm=self.tensor(keys.query_norm, (rank,)) if rank else None,
            q_up=self.matrix([heads(keys.query_up, mla.query_size, rank)]) if rank else None,
            kv_norm=self.tensor(keys.kv_norm, (mla.kv_rank,)),
            kv_up=self.multiplied_out(heads(keys.kv_up, mla.unfolded_size, mla.kv_rank)),
        )

    def _gate_up(self, keys: naming.MlpKeys, width: int) -> list[Part]:
        shape = (width, self._model_shape.hidden_size)
        return [Part(key, shape, self._shard.part(width)) for key in keys.gate_up]

    def _mixture(self, keys: naming.LayerKeys, experts: Experts) -> DeviceMixture:
        hidden, width = self._model_shape.hidden_size, experts.intermediate_size
        self._checked.refuse_fused(keys)
        each = [keys.expert(i) for i in range(experts.count)]
        bias = self._checked.choice_bias(keys, experts)
        router = self._checked.stored(keys.router, (experts.count, hidden))
        return DeviceMixture(
            router=self._place((router,), dtype="float32"),
            choice_bias=None if bias is None else self._place((bias,), dtype="float32"),
            gate_up=self.matrix([part for mlp in each for part in self._gate_up(mlp, width)]),
            down=self.matrix([self.columns(mlp.down, width) for mlp in each]),
        )

    def _qkv(self, keys: naming.LayerKeys) -> Weight:
        hidden = self._model_shape.hidden_size
        parts = zip(keys.qkv, self._qkv_rows(), strict=True)
        return self.matrix(
            [Part(key, (width, hidden), rows) for key, (width, own) in parts for rows in own]
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
        """Return rows of whole heads in the order of `ModelShape.stretches`."""
        parts, dim = self._model_shape.stretches, self._model_shape.head_dim
        if len(parts) == 1:
            return [rows]
        heads = range(rows.start, rows.stop, dim)
        return [slice(at + part.start, at + part.stop) for at in heads for part in parts]

    def mtp(self, index: int, shared_norm: Tensor) -> DeviceMtp:
        hidden = self._model_shape.hidden_size
        keys = self._checked.mtp_keys(index)
        has_own_norm = self._checked.has_own_norm(keys)
        return DeviceMtp(
            emb_norm=self.norm(keys.emb_norm),
            hidden_norm=self.norm(keys.hidden_norm),
            proj=self.matrix([Part(keys.proj, (hidden, 2 * hidden))], as_stored=True),
            layer=self.layer(keys.layer, self._model_shape.n_layers + index),
            final_norm=self.norm(keys.final_norm) if has_own_norm else shared_norm,
        )

    def head(self, embed: Tensor) -> Tensor:
        model_shape = self._model_shape
        whole, size = (model_shape.vocab_size, model_shape.hidden_size), self._shard.size
        ids, n_rows = self._shard.vocabulary(whole[0]), head_rows(whole[0], size)
        key = naming.LM_HEAD
        if model_shape.tie_word_embeddings:
            self._checked.check_copy(naming.LM_HEAD, naming.EMBED)
            if size == 1:
                return embed
            if ids.stop - ids.start == n_rows:
                return self._place.rows(embed, ids.start, ids.stop)
            key = naming.EMBED
        return self._place((self._checked.stored(key, whole).part(ids),), n_rows)

    def _qkv_bias(self, keys: naming.LayerKeys) -> Tensor:
        parts = zip(keys.qkv_bias, self._qkv_rows(), strict=True)
        return self.rows(*((key, (width,), rows) for key, (width, own) in parts for rows in own))

    def _qk_norm(self, keys: naming.LayerKeys) -> tuple[Tensor, Tensor]:
        query, key = keys.qk_norm
        shape, parts = (self._model_shape.head_dim,), self._model_shape.stretches
        return (
            self.rows(*((query, shape, part) for part in parts)),
            self.rows(*((key, shape, part) for part in parts)),
        )


class _Counted:
    """Places nothing, and counts the bytes in the files of what it was to place."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def __call__(
        self, parts: tuple[_Stored, ...], n_rows: int = 0, dtype: DType | None = None
    ) -> Tensor:
        for part in parts:
            part.require_float()
        self.n_bytes += sum(part.n_stored() for part in parts)

    def scaled(self, parts: ScaledParts) -> Scaled:
        self.n_bytes += sum(part.n_stored() for part in parts.values)
        return Scaled(None, None)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor


class _Copies:
    """Places stored tensors in new memory of the device."""

    def __init__(self, device: Device, dtype: DType, staging: Staging) -> None:
        self._device = device
        self._dtype = dtype
        self._staging = staging

    def __call__(
        self, parts: tuple[_Stored, ...], n_rows: int = 0, dtype: DType | None = None
    ) -> Tensor:
        return self._joined(parts, dtype or self._dtype, n_rows)

    def scaled(self, parts: ScaledParts) -> Scaled:
        return Scaled(self._joined(parts.values, "uint8"), self._joined(parts.scales, "float32"))

    def _joined(self, parts: Sequence[Source], dtype: DType, n_rows: int = 0) -> Tensor:
        n_stored = sum(part.shape[0] for part in parts)
        shape = (max(n_stored, n_rows), *parts[0].shape[1:])
        make = self._device.zeros if n_stored < n_rows else self._device.empty
        tensor = make(shape, dtype)
        start = 0
        for part in parts:
            stop = start + part.shape[0]
            self._staging.send(part, self._device.rows(tensor, start, stop), dtype)
            start = stop
        return tensor

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return self._device.rows(tensor, start, stop)
